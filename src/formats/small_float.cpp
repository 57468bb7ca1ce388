#include "formats/small_float.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>

#include "core/float_formats.h"
#include "core/text.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

constexpr int fp8_block = 128;
constexpr std::string_view form =
    "nvfp4 | nvfp4-div | mxfp4 | mxfp8 | fp8-tensor | fp8-channel | fp8-block128; fp8 with f32 scales, or -f16, -bf16, "
    "-e8m0";

constexpr std::array<float, 16> e2m1 = [] {
  std::array<float, 16> table{};
  for (uint32_t code = 0; code < table.size(); ++code) table[code] = f32_from_e2m1(code);
  return table;
}();

const std::array<float, 256>& e4m3() noexcept {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (uint32_t code = 0; code < values.size(); ++code) {
      const bool nan = (code & 0x7Fu) == 0x7Fu;
      values[code] = f32_from_e4m3(static_cast<uint8_t>(nan ? code - 1 : code));
    }
    return values;
  }();
  return table;
}

constexpr Scheme scheme_with(int bits, int block, ScaleType scale, bool divisor = false) {
  return {.family = SchemeFamily::small_float, .bits = bits, .block = block, .scale = scale, .divisor = divisor};
}

struct Named {
  std::string_view name;
  Scheme scheme;
};

constexpr Named fixed[] = {{"nvfp4", scheme_with(4, 16, ScaleType::e4m3)},
                           {"nvfp4-div", scheme_with(4, 16, ScaleType::e4m3, true)},
                           {"mxfp4", scheme_with(4, 32, ScaleType::e8m0)},
                           {"mxfp8", scheme_with(8, 32, ScaleType::e8m0)}};
constexpr Named fp8[] = {{"fp8-tensor", scheme_with(8, whole_tensor, ScaleType::f32)},
                         {"fp8-channel", scheme_with(8, whole_row, ScaleType::f32)},
                         {"fp8-block128", scheme_with(8, fp8_block, ScaleType::f32)}};
constexpr ScaleType fp8_scales[] = {ScaleType::f32, ScaleType::f16, ScaleType::bf16, ScaleType::e8m0};

std::string fp8_name(const Named& row, ScaleType scale) {
  return scale == ScaleType::f32 ? std::string(row.name) : concat(row.name, "-", to_string(scale));
}

/// E8M0 scales of rows and tensors are nobody's.
bool exists(const Named& row, ScaleType scale) { return scale != ScaleType::e8m0 || row.scheme.block == fp8_block; }

std::vector<Scheme> representative_schemes() {
  std::vector<Scheme> schemes;
  for (const Named& row : fixed) schemes.push_back(row.scheme);
  for (const Named& row : fp8) schemes.push_back(row.scheme);
  Scheme stored = fp8[1].scheme;
  stored.scale = ScaleType::bf16;
  schemes.push_back(stored);
  stored = fp8[2].scheme;
  stored.scale = ScaleType::e8m0;
  schemes.push_back(stored);
  return schemes;
}

std::string print(const Scheme& scheme) {
  for (const Named& row : fixed) {
    if (row.scheme == scheme) return std::string(row.name);
  }
  for (const Named& row : fp8) {
    Scheme wanted = row.scheme;
    wanted.scale = scheme.scale;
    if (wanted == scheme && exists(row, scheme.scale)) return fp8_name(row, scheme.scale);
  }
  return concat("float", scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

std::optional<Scheme> parse(std::string_view text) {
  for (const Named& row : fixed) {
    if (row.name == text) return row.scheme;
  }
  for (const Named& row : fp8) {
    for (const ScaleType scale : fp8_scales) {
      if (!exists(row, scale) || fp8_name(row, scale) != text) continue;
      Scheme scheme = row.scheme;
      scheme.scale = scale;
      return scheme;
    }
  }
  return std::nullopt;
}

TableFormat table(const Scheme& scheme) {
  const bool whole = scheme.block == whole_tensor;
  return {.bits = scheme.bits,
          .ascending = false,
          .block = whole ? whole_row : scheme.block,
          .block_rows = whole                 ? all_rows
                        : shares_rows(scheme) ? scheme.block
                                              : 1,
          .scale = scheme.scale,
          .rule = ScaleRule::small_float,
          .ties = Ties::even,
          .tensor_scale = scheme.scale == ScaleType::e4m3,
          .tensor_divides = scheme.divisor,
          .fixed = small_float_table(scheme.bits)};
}

/// To 20 bits.
float shortened(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 7u + (bits >> 4 & 1u)) & ~15u);
}

/// The exponent e of 2^e · [1, 2) ∋ x.
int exponent_of(float x) noexcept { return std::ilogb(x); }

/// The smallest power of two s with x / s at most what rounds to the largest value: below 7, at most 464.
float power_of_two_scale(float x, int bits) noexcept {
  const double top = bits == 4 ? 7.0 : 464.0;
  int exponent = exponent_of(x) - (bits == 4 ? 2 : 8);
  const double share = std::ldexp(static_cast<double>(x), -exponent);
  if (bits == 4 ? share >= top : share > top) ++exponent;
  return static_cast<float>(std::ldexp(1.0, std::clamp(exponent, -127, 127)));
}

}  // namespace

std::span<const float> small_float_table(int bits) noexcept {
  return bits == 4 ? std::span<const float>(e2m1) : std::span<const float>(e4m3());
}

uint8_t small_float_code(float x, int bits) noexcept {
  return bits == 4 ? static_cast<uint8_t>(e2m1_from_f32(x)) : e4m3_from_f32(x);
}

bool shares_rows(const Scheme& scheme) noexcept {
  const bool wide = scheme.block == whole_tensor || scheme.block == fp8_block;
  return scheme.family == SchemeFamily::small_float && wide;
}

float small_float_factor(float absmax) noexcept {
  if (absmax == 0) return 1.0f;
  const double scale = static_cast<double>(absmax) / 6.0;
  int exponent = exponent_of(static_cast<float>(scale)) - 7;  // scale / 2^exponent in [128, 256), or a rounding above
  if (std::ldexp(scale, -exponent) >= 216.0) ++exponent;
  return static_cast<float>(std::ldexp(1.0, std::max(exponent, -126)));
}

StoredScale positive_scale(float value, ScaleType type) noexcept {
  StoredScale result = store_scale(type == ScaleType::f32 ? shortened(value) : value, type);
  if (result.value > 0) return result;
  return {1, decode_scale(1, type), false};
}

StoredScale small_float_scale(const Scheme& scheme, float absmax, float factor) noexcept {
  if (absmax == 0) return store_scale(1.0f, scheme.scale);
  const float largest = small_float_largest(scheme.bits) * factor;
  const bool power = scheme.scale == ScaleType::e8m0;
  StoredScale result = power ? store_scale(power_of_two_scale(absmax, scheme.bits), scheme.scale)
                             : positive_scale(absmax / largest, scheme.scale);
  // A scale that was rounded up takes nothing beyond fp32: codes of positive scales ascend.
  while (!std::isfinite(result.value * largest)) {
    --result.bits;
    result.value = decode_scale(result.bits, scheme.scale);
  }
  return result;
}

float tensor_factor(const PackedWeight& canonical) {
  if (canonical.scheme.scale != ScaleType::e4m3) return 1.0f;
  return canonical.plane(PlaneRole::tensor_scale).bytes.as<float>()[0];
}

float scale_with_factor(float scale, float factor, bool divides) noexcept {
  return divides ? scale / factor : scale * factor;
}

SchemeRow small_float_row() {
  return table_row({.family = SchemeFamily::small_float,
                    .name = "float",
                    .description = "NVFP4, MXFP4, MXFP8 and FP8: E2M1 and E4M3 floats with scales of blocks or tensors",
                    .form = form,
                    .schemes = representative_schemes,
                    .print = print,
                    .parse = parse,
                    .table = table});
}

}  // namespace w4q::formats
