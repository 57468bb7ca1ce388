// Sums and extremes of arrays are the same on every instruction set, and those that plain loops give.
#include "core/measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "each_target.h"

namespace w4q {
using test::for_each_target;
namespace {

constexpr float infinite = std::numeric_limits<float>::infinity(), no_number = std::numeric_limits<float>::quiet_NaN();

/// Of sizes that are far apart, some of them twice.
std::vector<float> random_values(size_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<int>(40 * random_uniform(seed + 1, i)) - 20;
    values[i] = std::ldexp(static_cast<float>(random_uniform(seed, i / 2) - 0.5), exponent);
    if (i % 11 == 3) values[i] = i % 2 == 0 ? 0.0f : -0.0f;
  }
  return values;
}

Difference plain_difference(const std::vector<float>& a, const std::vector<float>& b) {
  Difference result;
  std::array<double, 8> squares{}, errors{};
  for (size_t i = 0; i < a.size(); ++i) {
    const double value = a[i], error = value - b[i];
    squares[i % 8] += value * value;
    errors[i % 8] += error * error;
    result.largest = std::max(result.largest, std::abs(error));
    result.changed += error != 0;
  }
  for (size_t lane = 0; lane < 8; ++lane) {
    result.squared += squares[lane];
    result.squared_error += errors[lane];
  }
  return result;
}

TEST(Measure, DifferencesAreThoseOfEightLanes) {
  for_each_target([] {
    for (size_t length = 0; length < 70; ++length) {
      const auto a = random_values(length, 3);
      auto b = random_values(length, 5);
      for (size_t i = 0; i < length; i += 4) b[i] = a[i];
      const Difference found = difference_of(a, b), expected = plain_difference(a, b);
      ASSERT_EQ(found.squared, expected.squared) << length;
      ASSERT_EQ(found.squared_error, expected.squared_error) << length;
      ASSERT_EQ(found.largest, expected.largest) << length;
      ASSERT_EQ(found.changed, expected.changed) << length;
    }
  });
}

TEST(Measure, ADifferenceThatIsNotFiniteShowsInTheSum) {
  for_each_target([] {
    for (size_t at = 0; at < 37; ++at) {
      for (const float bad : {no_number, infinite, -infinite}) {
        auto a = random_values(37, 3), b = a;
        b[at] = bad;
        ASSERT_FALSE(std::isfinite(difference_of(a, b).squared_error)) << at;
        a[at] = bad;
        ASSERT_FALSE(std::isfinite(difference_of(a, b).squared_error)) << at;
      }
    }
  });
}

TEST(Measure, TheTwoLargestMagnitudes) {
  for_each_target([] {
    for (size_t length = 0; length < 70; ++length) {
      const auto values = random_values(length, length);
      std::vector<float> sizes{0, 0};
      for (const float value : values) sizes.push_back(std::abs(value));
      std::ranges::sort(sizes, std::greater());
      const Magnitudes found = magnitudes_of(values);
      ASSERT_EQ(found.largest, sizes[0]) << length;
      ASSERT_EQ(found.second, sizes[1]) << length;
      ASSERT_EQ(found.zeros, std::ranges::count(values, 0.0f)) << length;
      ASSERT_TRUE(found.finite) << length;
    }
  });
}

TEST(Measure, WhatIsNotFiniteIsFoundAnywhere) {
  for_each_target([] {
    for (size_t at = 0; at < 37; ++at) {
      for (const float bad : {no_number, -no_number, infinite, -infinite}) {
        auto values = random_values(37, 3);
        ASSERT_TRUE(all_within(values, std::numeric_limits<float>::max()));
        values[at] = bad;
        ASSERT_FALSE(magnitudes_of(values).finite) << at;
        ASSERT_FALSE(all_within(values, std::numeric_limits<float>::max())) << at;
      }
    }
  });
}

TEST(Measure, TheLimitItselfIsWithin) {
  for_each_target([] {
    std::vector<float> values(37, -2.0f);
    EXPECT_TRUE(all_within(values, 2.0f));
    for (size_t at = 0; at < values.size(); ++at) {
      values[at] = std::nextafter(2.0f, 3.0f);
      ASSERT_FALSE(all_within(values, 2.0f)) << at;
      values[at] = 2.0f;
    }
  });
}

}  // namespace
}  // namespace w4q
