// Random integer weights on the GPU and decoded, for tests of kernels.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/rng.h"
#include "device/buffer.h"
#include "dialect_samples.h"
#include "formats/scheme_registry.h"
#include "kernels/linear/device_linear.h"
#include "repack/layout_registry.h"

namespace w4q::test {

struct IntegerSize {
  int64_t n, k;
};

/// A random weight on both sides. With act order every group has its number of inputs, as GPTQ makes them.
class IntegerWeight {
 public:
  IntegerWeight(const formats::Scheme& scheme, IntegerSize size, std::string_view layout, const device::Stream& stream)
      : IntegerWeight(random(scheme, size), layout, stream) {}
  IntegerWeight(const formats::PackedWeight& canonical, std::string_view layout, const device::Stream& stream)
      : scheme_(canonical.scheme), size_{canonical.n, canonical.k}, layout_(layout) {
    decoded_.resize(static_cast<size_t>(size_.n * size_.k));
    const auto& row = formats::scheme_row(scheme_.family);
    for (int64_t r = 0; r < size_.n; ++r) {
      row.decode_row(canonical, r,
                     std::span(decoded_).subspan(static_cast<size_t>(r * size_.k), static_cast<size_t>(size_.k)));
    }
    const auto packed = repack::layout_row(layout).pack(canonical);
    codes_ = copy(packed.plane(formats::PlaneRole::codes), stream);
    scales_ = copy(packed.plane(formats::PlaneRole::scales), stream);
    if (scheme_.asymmetric) zeros_ = copy(packed.plane(formats::PlaneRole::zeros), stream);
    if (scheme_.act_order) order_ = device::DeviceBuffer::copy_of(bytes_of(input_order(canonical)), stream);
    stream.synchronize();
  }

  kernels::DevicePass on_device() const {
    kernels::DevicePass weight;
    weight.scheme = scheme_;
    weight.n = size_.n;
    weight.k = size_.k;
    weight.codes = codes_.as<uint32_t>();
    weight.scales = scales_.data();
    weight.layout = layout_;
    weight.scale_max = 1;
    if (scheme_.asymmetric) weight.zeros = zeros_.as<uint32_t>();
    if (scheme_.act_order) weight.input_order = order_.as<int32_t>();
    return weight;
  }
  const std::vector<float>& decoded() const { return decoded_; }

 private:
  static formats::PackedWeight random(const formats::Scheme& scheme, IntegerSize size) {
    auto canonical = sample_integer(scheme, size.n, size.k, 11);
    if (scheme.act_order) shuffle_groups(canonical);
    return canonical;
  }
  static device::DeviceBuffer copy(const formats::Plane& plane, const device::Stream& stream) {
    return device::DeviceBuffer::copy_of(plane.bytes.bytes(), stream);
  }
  static void shuffle_groups(formats::PackedWeight& weight) {
    const auto index = weight.plane(formats::PlaneRole::group_index).bytes.as<int32_t>();
    for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(i) / weight.scheme.block;
    for (size_t i = index.size(); i > 1; --i) std::swap(index[i - 1], index[random_bits(5, i) % i]);
  }
  static std::vector<int32_t> input_order(const formats::PackedWeight& weight) {
    const auto index = weight.plane(formats::PlaneRole::group_index).bytes.as<int32_t>();
    std::vector<int32_t> order(index.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::ranges::stable_sort(order, {}, [&](int32_t input) { return index[static_cast<size_t>(input)]; });
    return order;
  }

  formats::Scheme scheme_;
  IntegerSize size_;
  std::string_view layout_;
  device::DeviceBuffer codes_, scales_, zeros_, order_;
  std::vector<float> decoded_;
};

}  // namespace w4q::test
