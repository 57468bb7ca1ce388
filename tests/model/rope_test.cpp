#include "model/rope_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "core/float_formats.h"

namespace w4q::model {
namespace {

constexpr double tau = 2 * std::numbers::pi;

/// Checks against a formula in fp64. The fp32 arithmetic rounds fewer than eight times.
void expect_frequencies(const RopeTable& table, int64_t length, const std::function<double(int64_t)>& exact) {
  const auto frequencies = table.inverse_frequencies(length);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double expected = exact(static_cast<int64_t>(i));
    EXPECT_NEAR(frequencies[i], expected, expected * 8 * 0x1p-24) << "pair " << i;
  }
}

double plain(double theta, int64_t dim, int64_t i) {
  return std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
}

TEST(Rope, Standard) {
  const RopeTable table({.theta = 5e5}, 64);
  EXPECT_EQ(table.pairs(), 32);
  expect_frequencies(table, 10, [](int64_t i) { return plain(5e5, 64, i); });
}

TEST(Rope, PartialRotationUsesFewerChannels) {
  const RopeTable table({.partial_rotary_factor = 0.25}, 64);
  EXPECT_EQ(table.pairs(), 8);
  expect_frequencies(table, 10, [](int64_t i) { return plain(1e4, 16, i); });
}

TEST(Rope, LinearDivides) {
  expect_frequencies(RopeTable({.type = RopeType::linear, .factor = 3}, 32), 10,
                     [](int64_t i) { return plain(1e4, 32, i) / 3; });
}

TEST(Rope, DynamicGrowsWithTheLength) {
  const RopeTable table({.type = RopeType::dynamic, .factor = 2.5, .original_max_positions = 64}, 32);
  for (const int64_t length : {1, 64}) {
    expect_frequencies(table, length, [](int64_t i) { return plain(1e4, 32, i); });
  }
  const double theta = 1e4 * std::pow(2.5 * 96 / 64 - 1.5, 32.0 / 30.0);
  expect_frequencies(table, 96, [&](int64_t i) { return plain(theta, 32, i); });
}

TEST(Rope, Llama3BlendsByWavelength) {
  const RopeTable table({.type = RopeType::llama3,
                         .theta = 5e5,
                         .factor = 8,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_positions = 8192},
                        128);
  int kept = 0, divided = 0, blended = 0;
  const auto frequencies = table.inverse_frequencies(1);
  for (int64_t i = 0; i < 64; ++i) {
    const double inverse = plain(5e5, 128, i), wavelength = tau / inverse;
    double expected = inverse, conditioning = 1;
    if (wavelength > 8192) {
      expected = inverse / 8;
      ++divided;
    } else if (wavelength > 2048) {
      const double t = (8192 / wavelength - 1) / 3;
      expected = (1 - t) * inverse / 8 + t * inverse;
      conditioning = 4;  // the blend moves up to 7/8 · 4/3 times as far as the wavelength, relative to a smaller result
      ++blended;
    } else {
      ++kept;
    }
    EXPECT_NEAR(frequencies[static_cast<size_t>(i)], expected, conditioning * expected * 8 * 0x1p-24) << i;
  }
  EXPECT_TRUE(kept > 0 && divided > 0 && blended > 0);
}

TEST(Rope, YarnRampsBetweenPairs) {
  for (const bool truncate : {true, false}) {
    const RopeTable table({.type = RopeType::yarn, .factor = 4, .original_max_positions = 4096, .truncate = truncate},
                          128);
    const auto pair = [](double rotations) { return 128 * std::log(4096 / (rotations * tau)) / (2 * std::log(1e4)); };
    const double low = truncate ? std::floor(pair(32)) : pair(32), high = truncate ? std::ceil(pair(1)) : pair(1);
    const auto frequencies = table.inverse_frequencies(1);
    for (int64_t i = 0; i < 64; ++i) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      const double inverse = plain(1e4, 128, i), expected = inverse / 4 * ramp + inverse * (1 - ramp);
      // 1 − ramp is rounded at 2^-24 and weighs the larger term, four times the result at most.
      EXPECT_NEAR(frequencies[static_cast<size_t>(i)], expected, 4 * expected * 8 * 0x1p-24) << i;
    }
  }
}

TEST(Rope, FillMultipliesTheAttentionFactor) {
  const RopeTable table({.type = RopeType::yarn, .factor = 4, .original_max_positions = 64, .attention_factor = 1.25},
                        16);
  std::vector<float> cosine(5 * 8), sine(5 * 8);
  table.fill(1000, {cosine.data(), 5, 8}, {sine.data(), 5, 8});
  const auto frequencies = table.inverse_frequencies(1005);
  for (size_t r = 0; r < 5; ++r) {
    for (size_t i = 0; i < 8; ++i) {
      // The angle is the fp32 product: at large positions its rounding is part of the definition.
      const double angle = static_cast<float>(1000 + r) * frequencies[i];
      EXPECT_NEAR(cosine[r * 8 + i], 1.25 * std::cos(angle), 2e-7);
      EXPECT_NEAR(sine[r * 8 + i], 1.25 * std::sin(angle), 2e-7);
    }
  }
}

TEST(Rope, RoundedFrequenciesAreThoseOfACastModule) {
  const RopeConfig rope{.theta = 5e5};
  const auto exact = RopeTable(rope, 64).inverse_frequencies(1);
  const auto rounded = RopeTable(rope, 64, DType::bf16).inverse_frequencies(1);
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_EQ(rounded[i], f32_from_bf16(bf16_from_f32(exact[i])));
}

}  // namespace
}  // namespace w4q::model
