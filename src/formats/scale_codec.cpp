#include "formats/scale_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "core/convert.h"
#include "core/float_formats.h"

namespace w4q::formats {
namespace {

using Limits = std::numeric_limits<float>;

constexpr ScaleCodec rows[] = {
    {.type = ScaleType::e4m4,
     .name = "e4m4",
     .dtype = DType::u8,
     .largest = e4m4_max,
     .overflow = 31.5f,
     .smallest_normal = e4m4_min_normal,
     .roundoff = 0x1p-5,
     .decode = [](uint32_t bits) noexcept { return e4m4_decode(static_cast<uint8_t>(bits)); },
     .encode = [](float value) noexcept { return uint32_t{e4m4_encode(value)}; }},
    {.type = ScaleType::f16,
     .name = "f16",
     .dtype = DType::f16,
     .largest = 65504.0f,
     .overflow = 65520.0f,
     .smallest_normal = 0x1p-14f,
     .roundoff = 0x1p-11,
     .decode = [](uint32_t bits) noexcept { return f32_from_f16(static_cast<uint16_t>(bits)); },
     .encode = [](float value) noexcept { return std::min<uint32_t>(f16_from_f32(value), 0x7BFF); }},
    {.type = ScaleType::bf16,
     .name = "bf16",
     .dtype = DType::bf16,
     .largest = 0x1.FEp127f,
     .overflow = 0x1.FFp127f,
     .smallest_normal = 0x1p-126f,
     .roundoff = 0x1p-8,
     .decode = [](uint32_t bits) noexcept { return f32_from_bf16(static_cast<uint16_t>(bits)); },
     .encode = [](float value) noexcept { return std::min<uint32_t>(bf16_from_f32(value), 0x7F7F); }},
    {.type = ScaleType::f32,
     .name = "f32",
     .dtype = DType::f32,
     .largest = Limits::max(),
     .overflow = Limits::infinity(),
     .smallest_normal = Limits::min(),
     .roundoff = 0x1p-24,
     .decode = [](uint32_t bits) noexcept { return std::bit_cast<float>(bits); },
     .encode = [](float value) noexcept { return std::bit_cast<uint32_t>(std::min(value, Limits::max())); }},
    {.type = ScaleType::e4m3,
     .name = "e4m3",
     .dtype = DType::f8_e4m3,
     .largest = 448.0f,
     .overflow = 464.0f,
     .smallest_normal = 0x1p-6f,
     .roundoff = 0x1p-4,
     .decode = [](uint32_t bits) noexcept { return f32_from_e4m3(static_cast<uint8_t>(bits)); },
     .encode = [](float value) noexcept { return uint32_t{e4m3_from_f32(value)}; }},
    {.type = ScaleType::e8m0,
     .name = "e8m0",
     .dtype = DType::f8_e8m0,
     .largest = 0x1p127f,
     .overflow = Limits::infinity(),
     .smallest_normal = 0x1p-127f,
     .roundoff = 1,
     .decode = [](uint32_t bits) noexcept { return f32_from_e8m0(static_cast<uint8_t>(bits)); },
     .encode = [](float value) noexcept { return uint32_t{e8m0_from_f32(value)}; }},
    {.type = ScaleType::nested,
     .name = "nested",
     .dtype = DType::u8,
     .largest = Limits::max(),
     .overflow = Limits::infinity(),
     .smallest_normal = Limits::min(),
     .roundoff = 1,
     .decode = nullptr,
     .encode = nullptr},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(rows); ++i) {
    if (rows[i].type != static_cast<ScaleType>(i)) return false;
  }
  return true;
}
static_assert(in_order(), "rows stand in the order of ScaleType");

/// All values of an 8-bit type.
using Values = std::array<float, 256>;

const Values& values_of(DType dtype) noexcept {
  const auto all = [](ScaleType type) {
    Values values{};
    for (uint32_t bits = 0; bits < values.size(); ++bits) values[bits] = scale_codec(type).decode(bits);
    return values;
  };
  static const Values e4m4 = all(ScaleType::e4m4), e4m3 = all(ScaleType::e4m3), e8m0 = all(ScaleType::e8m0);
  return dtype == DType::u8 ? e4m4 : dtype == DType::f8_e4m3 ? e4m3 : e8m0;
}

}  // namespace

const ScaleCodec& scale_codec(ScaleType type) noexcept { return rows[static_cast<size_t>(type)]; }

StoredScale store_scale(double value, ScaleType type, float most) noexcept {
  const bool saturated = value > static_cast<double>(most);
  const ScaleCodec& codec = scale_codec(type);
  const uint32_t bits = codec.encode(saturated ? most : static_cast<float>(value));
  return {bits, codec.decode(bits), saturated};
}

float load_scale(const Plane& scales, size_t index) noexcept {
  switch (scales.spec.dtype) {
    case DType::f32:
      return scales.bytes.as<float>()[index];
    case DType::f16:
      return f32_from_f16(scales.bytes.as<uint16_t>()[index]);
    case DType::bf16:
      return f32_from_bf16(scales.bytes.as<uint16_t>()[index]);
    default:
      return values_of(scales.spec.dtype)[scales.bytes.as<uint8_t>()[index]];
  }
}

void load_scales(const Plane& scales, size_t first, std::span<float> out) {
  const DType dtype = scales.spec.dtype;
  if (is_weight_dtype(dtype)) {
    const auto width = static_cast<size_t>(dtype_bits(dtype)) / 8;
    return widen(scales.bytes.bytes().subspan(first * width, out.size() * width), dtype, out);
  }
  const Values& values = values_of(dtype);
  const auto bytes = scales.bytes.as<uint8_t>().subspan(first, out.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = values[bytes[i]];
}

}  // namespace w4q::formats
