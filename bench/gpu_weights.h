// Weights made on the spot in GPU memory, with random codes and scales, for benchmarks of kernels.
#pragma once

#include <cstring>
#include <vector>

#include "core/float_formats.h"
#include "core/rng.h"
#include "device/buffer.h"
#include "formats/codebook.h"
#include "formats/small_float.h"
#include "kernels/linear/device_linear.h"
#include "repack/layout_registry.h"

namespace w4q::bench {

/// Several copies of one random weight in a layout, far apart in memory, to be used in turn.
class RotatingWeight {
 public:
  RotatingWeight(const formats::Scheme& scheme, std::string_view layout, int64_t n, int64_t k, int copies,
                 const device::Stream& stream) {
    weight_.scheme = scheme;
    weight_.layout = layout;
    weight_.n = n;
    weight_.k = k;
    weight_.scale_max = 0.125f;
    const auto codebook = codebook_of(scheme);
    codebook_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(codebook)), stream);
    weight_.codebook = codebook_.as<float>();
    for (const formats::PlaneSpec& spec : repack::layout_row(layout).planes(scheme, n, k)) {
      if (spec.role != formats::PlaneRole::codes && spec.role != formats::PlaneRole::scales) continue;
      const bool codes = spec.role == formats::PlaneRole::codes;
      const int64_t tile_bytes = (n + 63) / 64 * ((k + 63) / 64) * 8;  // of FP8: kernels/small_float/tile_scales.h
      const auto size = static_cast<size_t>(!codes && has_tile_scales(scheme) ? tile_bytes : plane_bytes(spec));
      const std::vector<uint8_t> values = codes ? random_codes(size) : random_scales(size, scheme.scale);
      auto& buffers = codes ? codes_ : scales_;
      for (int copy = 0; copy < copies; ++copy) {
        buffers.push_back(device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream));
      }
      bytes_ += static_cast<int64_t>(size);
      stream.synchronize();
    }
  }

  kernels::DevicePass weight(int call) const {
    const auto copy = static_cast<size_t>(call) % codes_.size();
    kernels::DevicePass weight = weight_;
    weight.codes = codes_[copy].as<uint32_t>();
    weight.scales = scales_[copy].data();
    return weight;
  }
  int64_t bytes() const noexcept { return bytes_; }
  /// Whether kernels read two f32 for a tile of 64 × 64 in place of the scheme's own scales: FP8.
  static bool has_tile_scales(const formats::Scheme& scheme) {
    return scheme.family == formats::SchemeFamily::small_float && scheme.bits == 8 && scheme.block != 32;
  }

 private:
  static std::vector<float> codebook_of(const formats::Scheme& scheme) {
    if (scheme.family == formats::SchemeFamily::kbit) return formats::codebook("nf", scheme.bits);
    if (scheme.family != formats::SchemeFamily::small_float) return {0};
    const auto table = formats::small_float_table(scheme.bits);
    return {table.begin(), table.end()};
  }
  static int64_t plane_bytes(const formats::PlaneSpec& spec) {
    return element_count(spec.shape) * dtype_bits(spec.dtype) / 8;
  }
  static std::vector<uint8_t> random_codes(size_t size) {
    std::vector<uint8_t> values(size);
    for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(random_bits(1, i / 8) >> (8 * (i % 8)));
    return values;
  }
  /// 2^-7 … 2^-3: what real weights have.
  static std::vector<uint8_t> random_scales(size_t size, formats::ScaleType type) {
    std::vector<uint8_t> values(size);
    if (type == formats::ScaleType::e4m3) {
      for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(0x10 + random_bits(2, i) % 16);
    } else if (type == formats::ScaleType::e4m4) {
      for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(0x40 + random_bits(2, i) % 64);
    } else if (type == formats::ScaleType::f32) {
      for (size_t i = 0; i + 3 < size; i += 4) {
        const auto value = static_cast<float>(0.0078125 + 0.1 * random_uniform(2, i));
        std::memcpy(values.data() + i, &value, sizeof(value));
      }
    } else {
      for (size_t i = 0; i + 1 < size; i += 2) {
        const uint16_t half = f16_from_f32(static_cast<float>(0.0078125 + 0.1 * random_uniform(2, i)));
        values[i] = static_cast<uint8_t>(half);
        values[i + 1] = static_cast<uint8_t>(half >> 8);
      }
    }
    return values;
  }

  std::vector<device::DeviceBuffer> codes_, scales_;
  device::DeviceBuffer codebook_;
  kernels::DevicePass weight_;
  int64_t bytes_ = 0;
};

/// Memory in which linears are multiplied.
class Workspace {
 public:
  Workspace(const kernels::WorkspaceSizes& sizes, const device::Stream& stream)
      : sizes_(sizes), semaphores_(stream.context(), sizes.semaphores), scratch_(stream.context(), sizes.scratch) {
    semaphores_.fill(0, stream);
  }
  kernels::Workspace get() { return {semaphores_.data(), scratch_.data(), sizes_}; }

 private:
  kernels::WorkspaceSizes sizes_;
  device::DeviceBuffer semaphores_, scratch_;
};

/// Random f16 values in [−1, 1).
inline std::vector<uint16_t> random_halves(size_t count, uint64_t seed) {
  std::vector<uint16_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = f16_from_f32(static_cast<float>(2 * random_uniform(seed, i) - 1));
  return values;
}

}  // namespace w4q::bench
