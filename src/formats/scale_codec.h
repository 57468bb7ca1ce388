// How the scale of a block is stored: one row per type. What reads, stores or limits a scale asks here.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"
#include "formats/e4m4.h"
#include "formats/packed.h"
#include "formats/scheme.h"

namespace w4q::formats {

struct ScaleCodec {
  ScaleType type;
  std::string_view name;  ///< as it stands in names of schemes
  DType dtype;            ///< of the plane
  float largest;          ///< the largest finite value
  float overflow;         ///< from here on a value rounds to more than the largest
  float smallest_normal;
  double roundoff;  ///< largest relative error of a value between smallest_normal and largest
  float (*decode)(uint32_t bits) noexcept;
  /// The nearest value, ties to even (E8M0: the next above); at most `largest`. `value` is finite and not negative.
  uint32_t (*encode)(float value) noexcept;
};

/// The row of a type. Nested scales take more than their own byte (table/nested_scales.h): their row has no codec.
const ScaleCodec& scale_codec(ScaleType type) noexcept;

/// A scale as its type stores it.
struct StoredScale {
  uint32_t bits = 0;
  float value = 0;  ///< decoded
  bool saturated = false;
};

inline float decode_scale(uint32_t bits, ScaleType type) noexcept {
  return type == ScaleType::e4m4 ? e4m4_decode(static_cast<uint8_t>(bits)) : scale_codec(type).decode(bits);
}
/// `value` as the type stores it; saturated: it would round to more than the largest.
inline StoredScale store_scale(float value, ScaleType type) noexcept {
  if (type == ScaleType::e4m4) {
    const uint8_t code = e4m4_encode(value);
    return {code, e4m4_decode(code), value >= 31.5f};
  }
  const ScaleCodec& codec = scale_codec(type);
  const uint32_t bits = codec.encode(value);
  return {bits, codec.decode(bits), value >= codec.overflow};
}
/// `value`, and at most `most`, as the type stores it; saturated: it was more.
StoredScale store_scale(double value, ScaleType type, float most) noexcept;

/// Scale `index` of a plane of any type but nested; those from `first` on; and storing the bits of one.
float load_scale(const Plane& scales, size_t index) noexcept;
void load_scales(const Plane& scales, size_t first, std::span<float> out);
inline void put_scale(Plane& scales, size_t index, uint32_t bits) noexcept {
  const DType dtype = scales.spec.dtype;
  if (dtype == DType::f32) {
    scales.bytes.as<uint32_t>()[index] = bits;
  } else if (dtype == DType::f16 || dtype == DType::bf16) {
    scales.bytes.as<uint16_t>()[index] = static_cast<uint16_t>(bits);
  } else {
    scales.bytes.as<uint8_t>()[index] = static_cast<uint8_t>(bits);
  }
}

}  // namespace w4q::formats
