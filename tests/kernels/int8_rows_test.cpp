#include "kernels/linear/int8_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/integer/int8_order.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

std::vector<int8_t> codes_of(const std::vector<float>& x, float* scale) {
  std::vector<int8_t> codes(x.size(), 99);
  *scale = quantize_int8(x, codes);
  return codes;
}

TEST(Int8Rows, TheLargestMagnitudeIs127AndTiesGoToEven) {
  float scale = 0;
  const auto codes = codes_of({-127, 0.5f, 1.5f, -2.5f, 63, -0.0f}, &scale);
  EXPECT_EQ(scale, 1);
  EXPECT_EQ(codes, (std::vector<int8_t>{-127, 0, 2, -2, 63, 0}));
}

TEST(Int8Rows, AnErrorIsAtMostHalfAStep) {
  const test::RandomMatrix x(40, 333, 5);
  std::vector<float> scales(40), codes(40 * 333);
  quantize_int8(x, scales, {codes.data(), 40, 333});
  for (int64_t r = 0; r < 40; ++r) {
    const float scale = scales[static_cast<size_t>(r)];
    float most = 0;
    for (int64_t c = 0; c < 333; ++c) {
      const float code = codes[static_cast<size_t>(r * 333 + c)];
      // The quotient is rounded to f32 before it is rounded to an integer.
      EXPECT_NEAR(x.row(r)[c], double{scale} * code, 0.5001 * scale);
      most = std::max(most, std::abs(code));
    }
    EXPECT_EQ(most, 127);
  }
}

TEST(Int8Rows, ZeroTinyAndInfiniteRows) {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<int8_t> none = {0, 0};
  float scale = 1;
  EXPECT_EQ(codes_of({0, -0.0f}, &scale), none);
  EXPECT_EQ(scale, 0);
  EXPECT_EQ(codes_of({0x1p-149f, 0}, &scale), none) << "its scale is no float";
  EXPECT_EQ(scale, 0);
  for (const auto& row : {std::vector<float>{1, infinity}, {-infinity, 1}, {nan, 1}, {1, nan}, {nan, infinity}}) {
    EXPECT_EQ(codes_of(row, &scale), none);
    EXPECT_TRUE(std::isnan(scale));
  }
  EXPECT_EQ(codes_of({std::numeric_limits<float>::max(), 0}, &scale), (std::vector<int8_t>{127, 0}));
  EXPECT_TRUE(codes_of({}, &scale).empty());
  EXPECT_EQ(scale, 0);
}

TEST(Int8Rows, SchemesWithAndWithoutAProduct) {
  for (const char* scheme : {"int4-g128-f16", "int4-g32-bf16-asym", "int8-row-f16", "int4-g64-f16-actorder"}) {
    EXPECT_TRUE(takes_int8_activations(formats::parse_scheme(scheme))) << scheme;
  }
  for (const char* scheme : {"kbit4-b32-e4m4", "int3-g128-f16", "int4-g128-f32", "rotated4-d128"}) {
    EXPECT_FALSE(takes_int8_activations(formats::parse_scheme(scheme))) << scheme;
  }
}

/// Two of Marlin's words make the fragment of 32 inputs: bytes 4t … 4t + 3 of either half.
TEST(Int8Rows, FourBytesAreWhatALaneHasOfTwoWords) {
  EXPECT_EQ(int8::place_of_input(0), 0);
  EXPECT_EQ(int8::place_of_input(16), 1);
  EXPECT_EQ(int8::place_of_input(1), 2);
  EXPECT_EQ(int8::place_of_input(17), 3);
  EXPECT_EQ(int8::place_of_input(2), 4);
  EXPECT_EQ(int8::place_of_input(8), 16);
  EXPECT_EQ(int8::place_of_input(31), 31);
  EXPECT_EQ(int8::place_of_input(32), 32);
}

}  // namespace
}  // namespace w4q::kernels
