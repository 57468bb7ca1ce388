// Quantized random kbit weights on both sides, for tests of kernels.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "device/buffer.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "kernels/common/table_stretch.h"
#include "kernels/linear/device_linear.h"
#include "pooled_normal.h"
#include "quantize/quantizer_registry.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::test {

struct WeightSize {
  int64_t n, k;
};

/// A quantized random weight on both sides.
class KbitWeight {
 public:
  KbitWeight(const formats::Scheme& scheme, WeightSize size, double magnitude, const device::Stream& stream,
             std::string_view layout = "kbit-fragment")
      : scheme_(scheme), size_(size), layout_(layout) {
    std::vector<float> values(static_cast<size_t>(size.n * size.k));
    fill_normal(values, 7, magnitude);
    const TensorView view{"w", DType::f32, {size.n, size.k}, bytes_of(values)};
    const auto canonical = quantize::quantizer_row("kbit").run(view, scheme, {}).weight;
    decoded_.resize(values.size());
    const auto& row = formats::scheme_row(scheme.family);
    parallel_for(size.n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        row.decode_row(canonical, r,
                       std::span(decoded_).subspan(static_cast<size_t>(r * size.k), static_cast<size_t>(size.k)));
      }
    });
    const auto packed = repack::layout_row(layout).pack(canonical);
    codes_ = device::DeviceBuffer::copy_of(packed.plane(formats::PlaneRole::codes).bytes.bytes(), stream);
    scales_ = device::DeviceBuffer::copy_of(packed.plane(formats::PlaneRole::scales).bytes.bytes(), stream);
    codebook_ = device::DeviceBuffer::copy_of(packed.plane(formats::PlaneRole::codebook).bytes.bytes(), stream);
    const auto table = packed.plane(formats::PlaneRole::codebook).bytes.as<float>();
    table_max_ = formats::table_max(table);
    stretch_ = kernels::table_stretch(table);
    product_stretch_ = kernels::product_stretch(table);
    scale_max_ = largest_scale(packed);
    stream.synchronize();
  }

  kernels::DevicePass on_device() const {
    return {.scheme = scheme_,
            .layout = layout_,
            .n = size_.n,
            .k = size_.k,
            .codes = codes_.as<uint32_t>(),
            .scales = scales_.data(),
            .codebook = codebook_.as<float>(),
            .table_max = table_max_,
            .table_stretch = stretch_,
            .product_stretch = product_stretch_,
            .scale_max = scale_max_};
  }
  kernels::DevicePass without_stretch() const {
    kernels::DevicePass plain = on_device();
    plain.table_stretch = plain.product_stretch = 1;
    return plain;
  }
  const std::vector<float>& decoded() const { return decoded_; }

 private:
  float largest_scale(const formats::PackedWeight& packed) const {
    const auto& bytes = packed.plane(formats::PlaneRole::scales).bytes;
    float most = 0x1p-14f;
    if (scheme_.scale == formats::ScaleType::e4m4) {
      for (const uint8_t bits : bytes.as<uint8_t>()) most = std::max(most, formats::e4m4_decode(bits));
    } else {
      for (const uint16_t bits : bytes.as<uint16_t>()) most = std::max(most, f32_from_f16(bits));
    }
    return most;
  }

  formats::Scheme scheme_;
  WeightSize size_;
  std::string_view layout_;
  device::DeviceBuffer codes_, scales_, codebook_;
  float table_max_ = 1, stretch_ = 1, product_stretch_ = 1, scale_max_ = 1;
  std::vector<float> decoded_;
};

}  // namespace w4q::test
