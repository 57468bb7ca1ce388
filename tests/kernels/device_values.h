// Values on their way to the GPU and back, for tests of kernels.
#pragma once

#include <vector>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "device/buffer.h"
#include "gpu.h"

namespace w4q::test {

/// Rounds to f16.
inline std::vector<uint16_t> halves(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  parallel_for(static_cast<int64_t>(bits.size()), 1 << 14, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) bits[i] = f16_from_f32(values[i]);
  });
  return bits;
}
inline std::vector<float> floats(const std::vector<uint16_t>& bits) {
  std::vector<float> values(bits.size());
  parallel_for(static_cast<int64_t>(bits.size()), 1 << 14, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) values[i] = f32_from_f16(bits[i]);
  });
  return values;
}
/// Values as f16 can say them.
inline std::vector<float> rounded(const std::vector<float>& values) { return floats(halves(values)); }

template <class T>
device::DeviceBuffer on_device(const std::vector<T>& values, const device::Stream& stream) {
  auto buffer = device::DeviceBuffer::copy_of(std::as_bytes(std::span<const T>(values)), stream);
  stream.synchronize();
  return buffer;
}
template <class T>
std::vector<T> from_device(const device::DeviceBuffer& buffer, size_t count, const device::Stream& stream) {
  std::vector<T> values(count);
  buffer.download(std::as_writable_bytes(std::span<T>(values)), stream);
  stream.synchronize();
  return values;
}
/// Memory in which an element that was not written shows: NaN in every type.
inline device::DeviceBuffer poisoned(size_t bytes, const device::Stream& stream) {
  device::DeviceBuffer buffer(test::gpu(), bytes);
  buffer.fill(0xFF, stream);
  return buffer;
}

}  // namespace w4q::test
