#include "core/float_formats.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace w4q {
namespace {

/// A short float with sign, `exponent_bits`, `mantissa_bits` and IEEE subnormals.
struct Layout {
  int exponent_bits;
  int mantissa_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

constexpr Layout half{5, 10};
constexpr Layout fp8_e4m3{4, 3};

/// Magnitude bits of |value| rounded to nearest even, the exponent unbounded above: the caller treats overflow.
/// `value` is finite. Rounding a mantissa up into the next exponent is a plain carry of the integer.
uint32_t round_magnitude(uint32_t magnitude_bits, Layout format) noexcept {
  const int shift = 23 - format.mantissa_bits;
  const int exponent = static_cast<int>(magnitude_bits >> 23) - 127 + format.bias();
  if (exponent >= 1) {
    const uint32_t rebased = magnitude_bits - (static_cast<uint32_t>(127 - format.bias()) << 23);
    const uint32_t lowest_kept = (rebased >> shift) & 1;
    return (rebased + ((1u << (shift - 1)) - 1) + lowest_kept) >> shift;
  }
  // Subnormal in the target: align the 24-bit significand to the fixed exponent, then round.
  const int total_shift = shift + 1 - exponent;
  if (total_shift > 25) return 0;
  const bool source_normal = (magnitude_bits >> 23) != 0;
  const uint32_t significand = (magnitude_bits & 0x7FFFFF) | (source_normal ? 0x800000u : 0u);
  const uint32_t kept = significand >> total_shift;
  const uint32_t rest = significand & ((1u << total_shift) - 1);
  const uint32_t tie = 1u << (total_shift - 1);
  return kept + ((rest > tie || (rest == tie && (kept & 1))) ? 1 : 0);
}

float widen_magnitude(uint32_t bits, Layout format) noexcept {
  const uint32_t exponent = bits >> format.mantissa_bits;
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
  if (exponent != 0) {
    return std::bit_cast<float>((exponent + 127 - static_cast<uint32_t>(format.bias())) << 23 |
                                mantissa << (23 - format.mantissa_bits));
  }
  // Exact: a small integer times a power of two.
  const float step = std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - format.bias() - format.mantissa_bits) << 23);
  return static_cast<float>(mantissa) * step;
}

float with_sign(float magnitude, bool negative) noexcept { return negative ? -magnitude : magnitude; }

}  // namespace

uint16_t f16_from_f32(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  if (magnitude == 0x7F800000) return sign | 0x7C00;
  const uint32_t rounded = round_magnitude(magnitude, half);
  return static_cast<uint16_t>(sign | (rounded > 0x7C00 ? 0x7C00 : rounded));
}

float f32_from_f16(uint16_t bits) noexcept {
  const bool negative = (bits & 0x8000) != 0;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {
    return std::bit_cast<float>((negative ? 0x80000000u : 0u) | 0x7F800000u | (magnitude & 0x3FF) << 13);
  }
  return with_sign(widen_magnitude(magnitude, half), negative);
}

uint16_t bf16_from_f32(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

uint8_t e4m3_from_f32(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7F;
  if (magnitude == 0x7F800000) return sign | 0x7E;
  const uint32_t rounded = round_magnitude(magnitude, fp8_e4m3);
  return static_cast<uint8_t>(sign | (rounded > 0x7E ? 0x7E : rounded));
}

float f32_from_e4m3(uint8_t bits) noexcept {
  const bool negative = (bits & 0x80) != 0;
  const uint32_t magnitude = bits & 0x7F;
  if (magnitude == 0x7F) return std::bit_cast<float>(negative ? 0xFFC00000u : 0x7FC00000u);
  return with_sign(widen_magnitude(magnitude, fp8_e4m3), negative);
}

uint8_t e8m0_from_f32(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0xFF;
  if (!(value > 0x1p-127f)) return 0;
  // Any bit of the mantissa, subnormals' included, rounds up into the next exponent.
  return static_cast<uint8_t>(std::min((bits + 0x7FFFFF) >> 23, 0xFEu));
}

float f32_from_e8m0(uint8_t bits) noexcept {
  if (bits == 0xFF) return std::numeric_limits<float>::quiet_NaN();
  return bits == 0 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(bits) << 23);
}

}  // namespace w4q
