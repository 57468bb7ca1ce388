#include "kernels/sampling/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "support.h"

namespace w4q::kernels {
namespace {

const std::vector<float> logits = {0.0f, 2.0f, 1.0f, 2.0f, -1.0f};

std::map<int32_t, int> histogram(const SamplingOptions& options, int draws) {
  std::map<int32_t, int> counts;
  for (int draw = 0; draw < draws; ++draw) ++counts[sample(logits, options, static_cast<uint64_t>(draw))];
  return counts;
}

TEST(Sampling, GreedyTakesTheLowestIdOnTies) { EXPECT_EQ(sample(logits, {}, 0), 1); }

TEST(Sampling, FollowsTheSoftmax) {
  const int draws = 20000;
  const auto counts = histogram({.temperature = 1, .seed = 3}, draws);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x);
  for (size_t id = 0; id < logits.size(); ++id) {
    const double p = std::exp(logits[id]) / sum;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(counts.at(static_cast<int32_t>(id)), p * draws, 5 * std::sqrt(p * (1 - p) * draws)) << id;
  }
}

TEST(Sampling, IsDeterministicInSeedAndDraw) {
  const SamplingOptions options{.temperature = 1, .seed = 11};
  EXPECT_EQ(histogram(options, 500), histogram(options, 500));
  EXPECT_NE(histogram(options, 500), histogram({.temperature = 1, .seed = 12}, 500));
}

TEST(Sampling, TopKKeepsTheLikeliest) {
  const auto counts = histogram({.temperature = 2, .top_k = 3}, 500);
  EXPECT_EQ(counts.size(), 3u);
  EXPECT_TRUE(counts.contains(1) && counts.contains(2) && counts.contains(3));
}

TEST(Sampling, TopPKeepsTheFewestThatReachTheSum) {
  // Probabilities 0.39, 0.39, 0.14, 0.05, 0.02: one token reaches 0.3, two reach 0.7, three reach 0.8.
  EXPECT_EQ(histogram({.temperature = 1, .top_p = 0.3}, 500).size(), 1u);
  EXPECT_EQ(histogram({.temperature = 1, .top_p = 0.7}, 500).size(), 2u);
  EXPECT_EQ(histogram({.temperature = 1, .top_p = 0.8}, 500).size(), 3u);
}

TEST(Sampling, MinPIsAFractionOfTheLargest) {
  // e^-1 = 0.37 of the largest is token 2; e^-2 = 0.14 is token 0.
  EXPECT_EQ(histogram({.temperature = 1, .min_p = 0.5}, 500).size(), 2u);
  EXPECT_EQ(histogram({.temperature = 1, .min_p = 0.3}, 500).size(), 3u);
}

TEST(Sampling, SurvivesNotANumber) {
  const std::vector<float> broken(9, std::numeric_limits<float>::quiet_NaN());
  EXPECT_LT(sample(broken, {.temperature = 1}, 0), 9);
  EXPECT_EQ(sample(broken, {}, 0), 0);
}

TEST(Sampling, RefusesOptionsOutOfRange) {
  using test::expect_error;
  expect_error(ErrorCode::bad_argument, {"temperature"}, [] { check_sampling({.temperature = -1}); });
  expect_error(ErrorCode::bad_argument, {"temperature"}, [] { check_sampling({.temperature = NAN}); });
  expect_error(ErrorCode::bad_argument, {"top-k"}, [] { check_sampling({.top_k = -1}); });
  expect_error(ErrorCode::bad_argument, {"top-p"}, [] { check_sampling({.top_p = 0}); });
  expect_error(ErrorCode::bad_argument, {"min-p"}, [] { check_sampling({.min_p = 1.5}); });
}

}  // namespace
}  // namespace w4q::kernels
