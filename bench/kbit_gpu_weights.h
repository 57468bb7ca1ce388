// kbit weights made on the spot in GPU memory, with random codes and scales, for benchmarks of kernels.
#pragma once

#include <vector>

#include "core/float_formats.h"
#include "core/rng.h"
#include "device/buffer.h"
#include "formats/codebook.h"
#include "kernels/kbit_linear.h"
#include "repack/layout_kbit_fragment.h"

namespace w4q::bench {

/// Several copies of one random weight in the kbit-fragment layout, far apart in memory, to be used in turn.
class RotatingKbitWeight {
 public:
  RotatingKbitWeight(int bits, int64_t n, int64_t k, int copies, const device::Stream& stream) {
    const repack::KbitFragmentMap map(n, k);
    std::vector<uint32_t> codes(static_cast<size_t>(map.tiles() * map.tile_words(bits)));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint32_t>(random_bits(1, i) >> 16);
    std::vector<uint8_t> scales(static_cast<size_t>(map.tiles() * map.tile_scales));
    // 2^-7 … 2^-3: what real weights have
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(0x40 + random_bits(2, i) % 64);
    const auto codebook = formats::codebook("nf", bits);
    codebook_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(codebook)), stream);
    for (int copy = 0; copy < copies; ++copy) {
      codes_.push_back(device::DeviceBuffer::copy_of(std::as_bytes(std::span(codes)), stream));
      scales_.push_back(device::DeviceBuffer::copy_of(std::as_bytes(std::span(scales)), stream));
    }
    stream.synchronize();
    bits_ = bits;
    n_ = n;
    k_ = k;
    bytes_ = static_cast<int64_t>(codes.size() * 4 + scales.size());
  }

  kernels::KbitDeviceWeight weight(int call) const {
    const auto copy = static_cast<size_t>(call) % codes_.size();
    return {{formats::SchemeFamily::kbit, bits_, 32, formats::ScaleType::e4m4},
            n_,
            k_,
            codes_[copy].as<uint32_t>(),
            scales_[copy].data(),
            codebook_.as<float>(),
            1.0f,
            31.0f};
  }
  int64_t bytes() const noexcept { return bytes_; }

 private:
  std::vector<device::DeviceBuffer> codes_, scales_;
  device::DeviceBuffer codebook_;
  int bits_ = 0;
  int64_t n_ = 0, k_ = 0, bytes_ = 0;
};

/// Random f16 values in [−1, 1).
inline std::vector<uint16_t> random_halves(size_t count, uint64_t seed) {
  std::vector<uint16_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = f16_from_f32(static_cast<float>(2 * random_uniform(seed, i) - 1));
  return values;
}

}  // namespace w4q::bench
