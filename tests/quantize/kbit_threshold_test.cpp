// The threshold tables that the GPU chooses codes with, proved on the CPU against the definition that divides.
#include "quantize/kbit_threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "core/rng.h"
#include "formats/codebook.h"
#include "formats/kbit.h"

namespace w4q::quantize {
namespace {

using formats::ScaleType;

std::vector<float> midpoints_of(int bits, int exponent) {
  const auto table = formats::kbit_scaled_codebook(formats::codebook("nf", bits), exponent);
  std::vector<float> midpoints(table.size() - 1);
  formats::kbit_midpoints(table, midpoints);
  return midpoints;
}

/// Both neighbours decide: the quotient is monotonic.
void expect_last(float threshold, float midpoint, float scale) {
  ASSERT_FALSE(threshold / scale > midpoint) << threshold << " " << midpoint << " " << scale;
  const float next = std::nextafter(threshold, INFINITY);
  ASSERT_TRUE(next / scale > midpoint) << threshold << " " << midpoint << " " << scale;
}

TEST(KbitThreshold, IsTheLastValueBelowTheMidpoint) {
  for (int exponent : {0, -119, -60, 20, 123}) {
    for (int bits = 2; bits <= 5; ++bits) {
      for (float midpoint : midpoints_of(bits, exponent)) {
        for (uint16_t code = 1; code < 256; ++code) {
          const float scale = formats::decode_scale(code, ScaleType::e4m4);
          expect_last(kbit_threshold(midpoint, scale), midpoint, scale);
        }
      }
    }
  }
}

TEST(KbitThreshold, HoldsForHalfScalesAndRandomMidpoints) {
  for (uint64_t i = 0; i < 200'000; ++i) {
    const auto code = static_cast<uint16_t>(1 + random_bits(1, i) % 0x7BFF);
    const float scale = formats::decode_scale(code, ScaleType::f16);
    const auto midpoint = static_cast<float>(random_normal(2, i) * std::exp2(-static_cast<double>(i % 30)));
    expect_last(kbit_threshold(midpoint, scale), midpoint, scale);
  }
}

TEST(KbitThreshold, AScaleOfZeroStandsForZeros) {
  EXPECT_EQ(kbit_threshold(-0.1f, 0), -INFINITY);
  EXPECT_EQ(kbit_threshold(0.1f, 0), INFINITY);
  EXPECT_EQ(kbit_threshold(0.0f, 0), INFINITY);
}

/// Every finite value of a 16-bit type against every scale: x > floor(threshold) is x / scale > midpoint.
void expect_codes(int bits, bool is_bf16) {
  const auto midpoints = midpoints_of(bits, 0);
  const uint32_t infinity = is_bf16 ? 0x7F80 : 0x7C00;
  const auto widen = [&](uint16_t raw) { return is_bf16 ? f32_from_bf16(raw) : f32_from_f16(raw); };
  for (uint16_t code = 0; code < 256; code += 3) {
    const float scale = formats::decode_scale(code, ScaleType::e4m4);
    std::vector<float> thresholds;
    for (float midpoint : midpoints) {
      const float exact = kbit_threshold(midpoint, scale);
      thresholds.push_back(widen(is_bf16 ? bf16_floor(exact) : f16_floor(exact)));
      ASSERT_FALSE(thresholds.back() == 0 && std::signbit(thresholds.back()));
    }
    for (uint32_t raw = 0; raw < 0x10000; raw += 1 + raw % 3) {
      if ((raw & 0x7FFF) >= infinity) continue;
      const float x = widen(static_cast<uint16_t>(raw));
      const int expected = formats::kbit_code(scale == 0 ? 0.0f : x / scale, midpoints);
      const int code_found = formats::kbit_code(x, thresholds);
      ASSERT_EQ(code_found, expected) << x << " / " << scale;
    }
  }
}

TEST(KbitThreshold, GivesTheCodesOfBfloat16) {
  for (int bits = 2; bits <= 5; ++bits) expect_codes(bits, true);
}

TEST(KbitThreshold, GivesTheCodesOfHalf) {
  for (int bits = 2; bits <= 5; ++bits) expect_codes(bits, false);
}

TEST(KbitThreshold, FloorsAreTheLargestValueNotAbove) {
  for (uint64_t i = 0; i < 300'000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random_bits(3, i)));
    if (!std::isfinite(value)) continue;
    const float bf16 = f32_from_bf16(bf16_floor(value));
    ASSERT_LE(bf16, value);
    const float half = f32_from_f16(f16_floor(value));
    if (value <= 65504.0f) {
      ASSERT_LE(half, value);
    }
    // The nearest is the floor or the value after it.
    const float near = f32_from_f16(f16_from_f32(value));
    if (near <= value && std::abs(value) <= 65504.0f) {
      ASSERT_EQ(half, near) << value;
    }
    const float near_bf16 = f32_from_bf16(bf16_from_f32(value));
    if (near_bf16 <= value) {
      ASSERT_EQ(bf16, near_bf16) << value;
    }
  }
}

}  // namespace
}  // namespace w4q::quantize
