#include "formats/e4m4.h"

#include <algorithm>

namespace w4q::formats {

uint8_t e4m4_encode_bnb(float value) noexcept {
  using namespace detail;
  if (!(value > 0)) return 0;
  if (value < e4m4_min_normal) return static_cast<uint8_t>(std::min(round_half_even(value * 0x1p14f), 15u));
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t exponent = std::min((bits >> fp32_mantissa_bits) - e4m4_rebias, 15u);
  const auto fraction = static_cast<float>(bits & ((1u << fp32_mantissa_bits) - 1));  // below 2^23: exact
  const uint32_t mantissa = std::min(round_half_even(fraction * 0x1p-19f), 15u);
  return static_cast<uint8_t>(exponent << e4m4_mantissa_bits | mantissa);
}

}  // namespace w4q::formats
