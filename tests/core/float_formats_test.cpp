// Conversions checked over all values of the short formats, and rounding against an independent nearest search.
#include "core/float_formats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/rng.h"
#include "support.h"

namespace w4q {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Value of a sign/exponent/mantissa pattern by the definition of IEEE-like formats, in double.
double decode_by_definition(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1 : 1;
  const double fraction = mantissa / std::ldexp(1.0, mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
}

template <class Bits, class Encode, class Decode>
void check_all_codes(int exponent_bits, int mantissa_bits, Bits first_special, Encode encode, Decode decode) {
  const uint32_t sign_bit = 1u << (exponent_bits + mantissa_bits);
  for (uint32_t magnitude = 0; magnitude < first_special; ++magnitude) {
    for (const uint32_t bits : {magnitude, magnitude | sign_bit}) {
      const float value = decode(static_cast<Bits>(bits));
      ASSERT_EQ(value, decode_by_definition(bits, exponent_bits, mantissa_bits)) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), bits >= sign_bit) << std::hex << bits;
      ASSERT_EQ(encode(value), bits) << std::hex << bits;
    }
  }
}

/// Between neighbours a < b: below the middle rounds to a, above to b, the middle itself to the even code.
template <class Bits, class Encode, class Decode>
void check_rounding(Bits first_special, Encode encode, Decode decode) {
  for (uint32_t low = 0; low + 1 < first_special; ++low) {
    const float a = decode(static_cast<Bits>(low));
    const float b = decode(static_cast<Bits>(low + 1));
    const float middle = a + (b - a) / 2;  // exact: short formats leave room in fp32
    ASSERT_EQ(encode(middle), low % 2 == 0 ? low : low + 1) << middle;
    ASSERT_EQ(encode(std::nextafter(middle, 0.0f)), low) << middle;
    ASSERT_EQ(encode(std::nextafter(middle, infinity)), low + 1) << middle;
  }
}

TEST(F16, AllCodesDecodeByDefinitionAndComeBack) {
  check_all_codes<uint16_t>(5, 10, 0x7C00, f16_from_f32, f32_from_f16);
}

TEST(F16, RoundsToNearestEvenBetweenAllNeighbours) { check_rounding<uint16_t>(0x7C00, f16_from_f32, f32_from_f16); }

TEST(F16, OverflowInfinityAndNaN) {
  EXPECT_EQ(f16_from_f32(65519.996f), 0x7BFF);  // below the middle between 65504 and 65536
  EXPECT_EQ(f16_from_f32(65520.0f), 0x7C00);
  EXPECT_EQ(f16_from_f32(-1e30f), 0xFC00);
  EXPECT_EQ(f16_from_f32(infinity), 0x7C00);
  EXPECT_EQ(f16_from_f32(0x1p-26f), 0);  // under half of the smallest subnormal 2^-24
  EXPECT_EQ(f16_from_f32(std::bit_cast<float>(1u)), 0);
  EXPECT_TRUE(std::isnan(f32_from_f16(f16_from_f32(nan))));
  for (uint32_t bits = 0x7C01; bits < 0x8000; ++bits)
    EXPECT_TRUE(std::isnan(f32_from_f16(static_cast<uint16_t>(bits))));
  EXPECT_EQ(f32_from_f16(0xFC00), -infinity);
}

TEST(Bf16, AllCodesComeBackAndRoundingIsNearestEven) {
  check_all_codes<uint16_t>(8, 7, 0x7F80, bf16_from_f32, f32_from_bf16);
  // All neighbours but the topmost: the middle above the largest finite value is the overflow case below.
  check_rounding<uint16_t>(0x7F80, bf16_from_f32, f32_from_bf16);
}

TEST(Bf16, OverflowInfinityAndNaN) {
  EXPECT_EQ(bf16_from_f32(infinity), 0x7F80);
  EXPECT_EQ(bf16_from_f32(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(nan))));
  // A NaN whose payload lies in the lower half only must not become infinity.
  EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(std::bit_cast<float>(0x7F800001u)))));
}

TEST(E4m3, AllCodesRoundingAndSaturation) {
  check_all_codes<uint8_t>(4, 3, 0x7F, e4m3_from_f32, f32_from_e4m3);
  check_rounding<uint8_t>(0x7F, e4m3_from_f32, f32_from_e4m3);
  EXPECT_EQ(f32_from_e4m3(0x7E), 448.0f);
  EXPECT_EQ(e4m3_from_f32(464.0f), 0x7E);
  EXPECT_EQ(e4m3_from_f32(1e9f), 0x7E);
  EXPECT_EQ(e4m3_from_f32(-infinity), 0xFE);
  EXPECT_TRUE(std::isnan(f32_from_e4m3(0x7F)));
  EXPECT_TRUE(std::isnan(f32_from_e4m3(0xFF)));
  EXPECT_TRUE(std::isnan(f32_from_e4m3(e4m3_from_f32(nan))));
}

TEST(E2m1, AllCodesRoundingAndSaturation) {
  const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint32_t code = 0; code < 8; ++code) EXPECT_EQ(f32_from_e2m1(code), values[code]);
  check_all_codes<uint8_t>(2, 1, 8, e2m1_from_f32, f32_from_e2m1);  // −0 too
  check_rounding<uint8_t>(8, e2m1_from_f32, f32_from_e2m1);
  EXPECT_EQ(e2m1_from_f32(infinity), 7u);
  EXPECT_EQ(e2m1_from_f32(-1e9f), 15u);
  EXPECT_EQ(e2m1_from_f32(nan) & 7u, 0u);
}

TEST(E8m0, AllCodesRoundUpAndSaturate) {
  for (uint32_t bits = 0; bits < 0xFF; ++bits) {
    const float value = f32_from_e8m0(static_cast<uint8_t>(bits));
    ASSERT_EQ(value, std::ldexp(1.0, static_cast<int>(bits) - 127));
    ASSERT_EQ(e8m0_from_f32(value), bits);
    ASSERT_EQ(e8m0_from_f32(std::nextafter(value, infinity)), std::min(bits + 1, 0xFEu));
  }
  EXPECT_TRUE(std::isnan(f32_from_e8m0(0xFF)));
  EXPECT_EQ(e8m0_from_f32(nan), 0xFF);
  EXPECT_EQ(e8m0_from_f32(infinity), 0xFE);
  for (const float value : {0.0f, -1.0f, std::numeric_limits<float>::denorm_min()}) EXPECT_EQ(e8m0_from_f32(value), 0);
}

/// The nearest half of any fp32 value, found by looking at both neighbours of the rounded result.
TEST(F16, RandomBitPatternsAreNeverFartherThanANeighbour) {
  for (uint64_t i = 0; i < 200'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random_bits(11, i)));
    if (!std::isfinite(value) || std::abs(value) >= 65520) continue;
    const uint16_t bits = f16_from_f32(value);
    const double distance = std::abs(double{value} - f32_from_f16(bits));
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<uint16_t>(bits + step);
      if ((neighbour & 0x7C00) == 0x7C00) continue;
      ASSERT_LE(distance, std::abs(double{value} - f32_from_f16(neighbour))) << value;
    }
  }
}

}  // namespace
}  // namespace w4q
