#include "model/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/rng.h"

namespace w4q::model {
namespace {

const std::vector<float> scores_in = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f, 1.0f};

Routing routed(MixtureConfig mixture, const std::vector<float>& correction = {}, const std::vector<float>& scale = {}) {
  mixture.experts = 6;
  return route(mixture, {scores_in.data(), 1, 6}, correction, scale);
}

double softmax(size_t expert) {
  double sum = 0;
  for (const float value : scores_in) sum += std::exp(double{value});
  return std::exp(double{scores_in[expert]}) / sum;
}

TEST(Router, TakesTheLargest) {
  const auto found = routed({.chosen = 3});
  EXPECT_EQ(found.experts, (std::vector<int32_t>{1, 3, 5}));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(found.shares[i], softmax(static_cast<size_t>(found.experts[i])), 1e-6);
  }
}

TEST(Router, RenormalizesAndScales) {
  const auto found = routed({.chosen = 2, .renormalizes = true, .scale = 2.5});
  EXPECT_NEAR(found.shares[0] + found.shares[1], 2.5, 1e-6);
  EXPECT_NEAR(found.shares[0] / found.shares[1], std::exp(0.5), 1e-5);
  const auto sigmoid = routed({.chosen = 1, .scoring = Scoring::sigmoid});
  EXPECT_NEAR(sigmoid.shares[0], 1 / (1 + std::exp(-2.0)), 1e-6);
}

/// A correction decides who is chosen, not with which share.
TEST(Router, CorrectionsAreOfTheChoiceAlone) {
  const auto found = routed({.chosen = 1}, {0, 0, 1, 0, 0, 0});
  EXPECT_EQ(found.experts, (std::vector<int32_t>{2}));
  EXPECT_NEAR(found.shares[0], softmax(2), 1e-6);
  EXPECT_NEAR(routed({.chosen = 1}, {}, {1, 3, 1, 1, 1, 1}).shares[0], 3 * softmax(1), 1e-6);
}

/// Three groups of two: by their sums the second and the first are the best, so that the third is not asked.
TEST(Router, AsksTheBestGroups) {
  const auto found = routed({.chosen = 3, .groups = 3, .chosen_groups = 1});
  EXPECT_EQ(std::vector<int32_t>(found.experts.begin(), found.experts.begin() + 2), (std::vector<int32_t>{1, 0}));
  const auto two = routed({.chosen = 2, .scoring = Scoring::sigmoid, .groups = 3, .chosen_groups = 2});
  EXPECT_EQ(two.experts, (std::vector<int32_t>{1, 5}));
}

TEST(Router, OfEqualsTheFirst) {
  const std::vector<float> same(6, 0.25f);
  const auto found = route({.experts = 6, .chosen = 2}, {same.data(), 1, 6}, {}, {});
  EXPECT_EQ(found.experts, (std::vector<int32_t>{0, 1}));
}

}  // namespace
}  // namespace w4q::model
