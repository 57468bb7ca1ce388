#include "formats/e4m4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_formats.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

double definition(int code) {
  const int exponent = code / 16;
  const int mantissa = code % 16;
  return exponent == 0 ? std::ldexp(mantissa / 16.0, -10) : std::ldexp(1 + mantissa / 16.0, exponent - 11);
}

/// The nearest of the 256 values by trying all of them; of two equally near ones the even code.
int nearest_by_search(double value) {
  int best = 0;
  for (int code = 1; code < 256; ++code) {
    const double difference = std::abs(definition(code) - value) - std::abs(definition(best) - value);
    if (difference < 0 || (difference == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

/// The peer's rule as its formula reads, in double.
int bnb_by_formula(double value) {
  if (!(value > 0)) return 0;
  int exponent = 0;
  std::frexp(value, &exponent);
  --exponent;
  const bool subnormal = exponent + 11 <= 0;
  const double mantissa = subnormal ? std::ldexp(value, 10) * 16 : (std::ldexp(value, -exponent) - 1) * 16;
  const int rounded = std::min(15, static_cast<int>(std::nearbyint(mantissa)));
  return std::clamp(exponent + 11, 0, 15) * 16 + rounded;
}

TEST(E4m4, DecodesEveryCodeAndEncodesItBack) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(static_cast<double>(e4m4_decode(byte)), definition(code)) << code;
    EXPECT_EQ(e4m4_encode(e4m4_decode(byte)), code);
    EXPECT_EQ(e4m4_encode_bnb(e4m4_decode(byte)), code);
  }
  EXPECT_EQ(e4m4_decode(0xFF), e4m4_max);
  EXPECT_EQ(e4m4_decode(0x10), e4m4_min_normal);
}

TEST(E4m4, EveryHalfFloatGoesToTheNearestValue) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f32_from_f16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    const int expected = std::isinf(value) ? (value > 0 ? 0xFF : 0) : nearest_by_search(std::max(0.0, double{value}));
    ASSERT_EQ(e4m4_encode(value), expected) << value;
  }
}

TEST(E4m4, EveryHalfFloatFollowsTheFormulaOfThePeer) {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const float value = f32_from_f16(static_cast<uint16_t>(bits));
    ASSERT_EQ(e4m4_encode_bnb(value), bnb_by_formula(value)) << value;
  }
}

TEST(E4m4, NeighboursOfEveryTieFallOnTheRightSide) {
  for (int code = 0; code < 255; ++code) {
    const auto tie = static_cast<float>((definition(code) + definition(code + 1)) / 2);  // exact in fp32
    EXPECT_EQ(e4m4_encode(tie), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(e4m4_encode(std::nextafter(tie, 0.0f)), code);
    EXPECT_EQ(e4m4_encode(std::nextafter(tie, 100.0f)), code + 1);
  }
}

TEST(E4m4, RulesDifferWhereTheMantissaCarriesAndAbove32) {
  EXPECT_EQ(e4m4_encode(1.984375f), 0xC0);
  EXPECT_EQ(e4m4_encode_bnb(1.984375f), 0xBF);
  EXPECT_EQ(e4m4_encode(40.0f), 0xFF);
  EXPECT_EQ(e4m4_encode_bnb(32.0f), 0xF0);
  EXPECT_EQ(e4m4_encode_bnb(40.0f), 0xF4);
  EXPECT_EQ(e4m4_encode(std::numeric_limits<float>::max()), 0xFF);
  EXPECT_EQ(e4m4_encode(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(e4m4_encode(-1.0f), 0);
}

TEST(E4m4, AgreesWithGoldenTable) {
  const auto file = io::Checkpoint::open(test::testdata() / "golden" / "e4m4_encode.safetensors");
  const auto x = file.load("in.x");
  const auto w4q = file.load("w4q");
  const auto bnb = file.load("bnb");
  const auto table = file.load("decode_table");
  const auto count = static_cast<size_t>(element_count(x->shape));
  ASSERT_GT(count, 700u);
  for (size_t i = 0; i < count; ++i) {
    float value = 0;
    std::memcpy(&value, x->bytes.data() + 4 * i, sizeof value);
    EXPECT_EQ(std::byte{e4m4_encode(value)}, w4q->bytes[i]) << value;
    EXPECT_EQ(std::byte{e4m4_encode_bnb(value)}, bnb->bytes[i]) << value;
  }
  for (size_t code = 0; code < 256; ++code) {
    float value = 0;
    std::memcpy(&value, table->bytes.data() + 4 * code, sizeof value);
    EXPECT_EQ(e4m4_decode(static_cast<uint8_t>(code)), value);
  }
}

}  // namespace
}  // namespace w4q::formats
