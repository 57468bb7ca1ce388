#include "model/router.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace w4q::model {
namespace {

constexpr float never = -std::numeric_limits<float>::infinity();

void score(Scoring scoring, std::span<const float> logits, std::vector<float>& scores) {
  if (scoring == Scoring::sigmoid) {
    std::ranges::transform(logits, scores.begin(), [](float x) { return 1.0f / (1.0f + std::exp(-x)); });
    return;
  }
  const float largest = std::ranges::max(logits);
  std::ranges::transform(logits, scores.begin(), [&](float x) { return std::exp(x - largest); });
  const float sum = std::accumulate(scores.begin(), scores.end(), 0.0f);
  for (float& value : scores) value /= sum;
}

/// Experts outside of the best groups cannot be chosen.
void leave_groups(const MixtureConfig& mixture, std::vector<float>& ranked) {
  const auto size = static_cast<size_t>(mixture.experts / mixture.groups);
  std::vector<std::pair<float, size_t>> groups;
  for (size_t group = 0; group < static_cast<size_t>(mixture.groups); ++group) {
    std::vector<float> members(ranked.begin() + static_cast<std::ptrdiff_t>(group * size),
                               ranked.begin() + static_cast<std::ptrdiff_t>((group + 1) * size));
    const size_t best = std::min<size_t>(2, size);
    std::ranges::partial_sort(members, members.begin() + static_cast<std::ptrdiff_t>(best), std::greater{});
    groups.emplace_back(-std::accumulate(members.begin(), members.begin() + static_cast<std::ptrdiff_t>(best), 0.0f),
                        group);
  }
  std::ranges::sort(groups);
  for (size_t i = static_cast<size_t>(mixture.chosen_groups); i < groups.size(); ++i) {
    std::fill_n(ranked.begin() + static_cast<std::ptrdiff_t>(groups[i].second * size), size, never);
  }
}

}  // namespace

Routing route(const MixtureConfig& mixture, MatrixView<const float> logits, std::span<const float> correction,
              std::span<const float> expert_scale) {
  const auto experts = static_cast<size_t>(mixture.experts), chosen = static_cast<size_t>(mixture.chosen);
  const auto fits = [&](std::span<const float> values) { return values.empty() || values.size() == experts; };
  ensure(logits.cols == mixture.experts && fits(correction) && fits(expert_scale), "route: shapes differ");
  Routing result;
  std::vector<float> scores(experts), ranked(experts);
  std::vector<int32_t> order(experts);
  for (int64_t r = 0; r < logits.rows; ++r) {
    score(mixture.scoring, {logits.row(r), experts}, scores);
    for (size_t i = 0; i < experts; ++i) ranked[i] = scores[i] + (correction.empty() ? 0.0f : correction[i]);
    if (mixture.groups > 1) leave_groups(mixture, ranked);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::partial_sort(order, order.begin() + static_cast<std::ptrdiff_t>(chosen), [&](int32_t a, int32_t b) {
      const float left = ranked[static_cast<size_t>(a)], right = ranked[static_cast<size_t>(b)];
      return left != right ? left > right : a < b;
    });
    float sum = 0;
    for (size_t i = 0; i < chosen; ++i) sum += scores[static_cast<size_t>(order[i])];
    const float scale = static_cast<float>(mixture.scale) / (mixture.renormalizes && sum > 0 ? sum : 1.0f);
    for (size_t i = 0; i < chosen; ++i) {
      const auto expert = static_cast<size_t>(order[i]);
      result.experts.push_back(order[i]);
      result.shares.push_back(scores[expert] * scale * (expert_scale.empty() ? 1.0f : expert_scale[expert]));
    }
  }
  return result;
}

void route_gradient(const MixtureConfig& mixture, MatrixView<const float> logits, const Routing& routing,
                    std::span<const float> expert_scale, std::span<const float> by_shares,
                    MatrixView<float> by_logits) {
  const auto experts = static_cast<size_t>(mixture.experts), chosen = static_cast<size_t>(mixture.chosen);
  ensure(logits.cols == mixture.experts && by_logits.cols == logits.cols && by_logits.rows == logits.rows &&
             routing.experts.size() == static_cast<size_t>(logits.rows) * chosen &&
             by_shares.size() == routing.experts.size(),
         "route_gradient: shapes differ");
  std::vector<float> scores(experts);
  std::vector<double> by_scores(experts);
  for (int64_t r = 0; r < logits.rows; ++r) {
    score(mixture.scoring, {logits.row(r), experts}, scores);
    const size_t first = static_cast<size_t>(r) * chosen;
    const auto expert = [&](size_t i) { return static_cast<size_t>(routing.experts[first + i]); };
    // By scores · scale, which are divided by the sum of the scores where shares add up to one.
    const auto by_scaled = [&](size_t i) {
      return double{by_shares[first + i]} * mixture.scale *
             (expert_scale.empty() ? 1.0 : double{expert_scale[expert(i)]});
    };
    double sum = 0, product = 0;
    for (size_t i = 0; i < chosen; ++i) {
      sum += double{scores[expert(i)]};
      product += by_scaled(i) * double{scores[expert(i)]};
    }
    const bool divides = mixture.renormalizes && sum > 0;
    std::ranges::fill(by_scores, 0.0);
    for (size_t i = 0; i < chosen; ++i) {
      by_scores[expert(i)] = divides ? (by_scaled(i) - product / sum) / sum : by_scaled(i);
    }
    const bool softmax = mixture.scoring == Scoring::softmax;
    double mean = 0;
    for (size_t e = 0; softmax && e < experts; ++e) mean += by_scores[e] * double{scores[e]};
    for (size_t e = 0; e < experts; ++e) {
      const double s = scores[e];
      by_logits.row(r)[e] = static_cast<float>(softmax ? s * (by_scores[e] - mean) : s * (1 - s) * by_scores[e]);
    }
  }
}

}  // namespace w4q::model
