// Targets for linears behind quantized layers.
#include "quantize/asymmetric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "kernels/random_matrix.h"
#include "quantize/awq.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using test::RandomMatrix;

/// Inputs x of a layer, correlated, and x̂, which differ from them.
struct Inputs {
  Inputs(int64_t tokens, int64_t k) : plain(tokens, k, 1), quantized(tokens, k, 2) {
    for (int64_t t = 0; t < tokens; ++t) {
      float* const x = plain.view().row(t);
      float* const rounded = quantized.view().row(t);
      for (int64_t c = 1; c < k; ++c) x[c] = 0.7f * x[c - 1] + 0.7f * x[c];
      for (int64_t c = 0; c < k; ++c) rounded[c] = 0.9f * x[c] + 0.2f * x[(c + 3) % k] + 0.1f * rounded[c];
    }
    pair = make_input_pair(k);
    add_rows(pair, plain, quantized, "x");
    gram = mean_gram(pair.quantized);
    drift = mean_drift(pair);
  }

  int64_t k() const { return plain.cols; }
  ErrorFactor factor(double damping = 0.01) const { return {{gram.data(), k(), k()}, 32, damping, "x"}; }
  double mean() const {
    double sum = 0;
    for (int64_t c = 0; c < k(); ++c) sum += double{gram[static_cast<size_t>(c * k() + c)]};
    return sum / static_cast<double>(k());
  }
  std::vector<float> followed(const RandomMatrix& weight, const ErrorFactor& factor,
                              const MoveLimit& limit = {}) const {
    std::vector<float> result = weight.values;
    follow_inputs({result.data(), weight.rows, weight.cols}, {drift.data(), k(), k()}, factor, mean(), limit);
    return result;
  }

  RandomMatrix plain, quantized;
  InputPair pair;
  std::vector<float> gram, drift;
};

TEST(Asymmetric, DriftIsTheSumByDefinition) {
  const Inputs inputs(700, 40);  // more rows than are summed in fp32 at a time
  for (int64_t i = 0; i < inputs.k(); ++i) {
    for (int64_t j = 0; j < inputs.k(); ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t t = 0; t < inputs.plain.rows; ++t) {
        const float apart = inputs.plain.row(t)[i] - inputs.quantized.row(t)[i];
        const double product = double{apart} * double{inputs.quantized.row(t)[j]};
        sum += product, magnitude += std::abs(product);
      }
      EXPECT_NEAR(inputs.pair.drift[static_cast<size_t>(i * inputs.k() + j)], sum, test::gamma(512) * magnitude);
    }
  }
}

/// Σ|W·x − W'·x̂|² + λ·|W' − W|² is least where it has no slope: (W' − W)·(Ĝ + λ) = W·D.
TEST(Asymmetric, TargetsAreWhereTheErrorOfOutputsIsLeast) {
  const Inputs inputs(500, 96);
  const RandomMatrix weight(70, 96, 5);
  for (const double damping : {0.01, 0.3}) {
    const auto target = inputs.followed(weight, inputs.factor(damping));
    const double ridge = damping * inputs.mean();
    for (int64_t r = 0; r < weight.rows; ++r) {
      for (int64_t c = 0; c < inputs.k(); ++c) {
        double left = 0, right = 0, magnitude = 0;
        for (int64_t j = 0; j < inputs.k(); ++j) {
          const auto at = static_cast<size_t>(r * inputs.k() + j);
          const double move = double{target[at]} - double{weight.values[at]};
          const double product =
              move * (double{inputs.gram[static_cast<size_t>(j * inputs.k() + c)]} + (j == c ? ridge : 0.0));
          left += product, magnitude += std::abs(product);
          const double pulled =
              double{weight.values[at]} * double{inputs.drift[static_cast<size_t>(j * inputs.k() + c)]};
          right += pulled, magnitude += std::abs(pulled);
        }
        // The factor is fp32; measured 2e-6.
        EXPECT_NEAR(left, right, 2e-5 * magnitude) << r << " " << c;
      }
    }
  }
}

TEST(Asymmetric, OutputsComeNearer) {
  const Inputs inputs(500, 96);
  const RandomMatrix weight(16, 96, 5);
  const auto target = inputs.followed(weight, inputs.factor());
  double before = 0, after = 0;
  for (int64_t t = 0; t < inputs.plain.rows; ++t) {
    for (int64_t r = 0; r < weight.rows; ++r) {
      double wanted = 0, plain = 0, followed = 0;
      for (int64_t c = 0; c < inputs.k(); ++c) {
        const auto at = static_cast<size_t>(r * inputs.k() + c);
        wanted += double{weight.values[at]} * double{inputs.plain.row(t)[c]};
        plain += double{weight.values[at]} * double{inputs.quantized.row(t)[c]};
        followed += double{target[at]} * double{inputs.quantized.row(t)[c]};
      }
      before += (plain - wanted) * (plain - wanted);
      after += (followed - wanted) * (followed - wanted);
    }
  }
  EXPECT_LT(after, 0.3 * before);  // measured 0.23
}

/// What few tokens say is mostly their noise: where both inputs differ by that alone, all that is learned from them makes
/// fresh outputs worse, and what is made of it does less harm.
TEST(Asymmetric, OfFewTokensLittleIsBelieved) {
  const int64_t k = 96;
  EXPECT_LT(supported_share(k, k), 0.1);
  EXPECT_GT(supported_share(1024 * k, k), 0.95);
  const MoveLimit limit = move_limit(4, 500, k);
  EXPECT_EQ(limit.share, supported_share(500, k));
  EXPECT_EQ(limit.size, move_limit(4).size);

  Inputs inputs(200, k);
  const RandomMatrix noise(200, k, 77);
  for (size_t i = 0; i < noise.values.size(); ++i)
    inputs.plain.values[i] = inputs.quantized.values[i] + 0.1f * noise.values[i];
  InputPair pair = make_input_pair(k);
  add_rows(pair, inputs.plain, inputs.quantized, "x");
  inputs.drift = mean_drift(pair);
  const RandomMatrix weight(16, k, 5), fresh(400, k, 99);
  const auto harm = [&](double share) {
    const auto target = inputs.followed(weight, inputs.factor(), {.share = share});
    double sum = 0;
    for (int64_t t = 0; t < fresh.rows; ++t) {
      for (int64_t r = 0; r < weight.rows; ++r) {
        double change = 0;
        for (int64_t c = 0; c < k; ++c) {
          const auto at = static_cast<size_t>(r * k + c);
          change += (double{target[at]} - double{weight.values[at]}) * double{fresh.row(t)[c]};
        }
        sum += change * change;
      }
    }
    return sum;
  };
  const double all = harm(1), some = harm(supported_share(200, k));
  EXPECT_GT(all, 0.0);
  EXPECT_NEAR(some, std::pow(supported_share(200, k), 2) * all, 1e-4 * all);
}

/// Rows that want to go further than they may go as far as they may, in the same direction; the others are untouched.
TEST(Asymmetric, RowsMoveNoFurtherThanTheyMay) {
  const Inputs inputs(500, 96);
  RandomMatrix weight(64, 96, 5);
  std::fill_n(weight.view().row(7), inputs.k(), 0.0f);
  const auto factor = inputs.factor();
  const auto target = inputs.followed(weight, factor);
  std::vector<double> wanted;
  const auto energies = [&](int64_t r, std::span<const float> moved) {
    double size = 0, own = 0, along = 0;
    for (int64_t c = 0; c < inputs.k(); ++c) {
      const auto at = static_cast<size_t>(r * inputs.k() + c);
      const double move = double{moved[at]} - double{weight.values[at]};
      size += move * move, own += double{weight.values[at]} * double{weight.values[at]};
      along += move * (double{target[at]} - double{weight.values[at]});
    }
    return std::array{size, own, along};
  };
  for (int64_t r = 0; r < weight.rows; ++r) {
    const auto [size, own, along] = energies(r, target);
    if (own > 0) wanted.push_back(size / own);
  }
  std::ranges::sort(wanted);
  const double most = wanted[wanted.size() / 2];
  const auto limited = inputs.followed(weight, factor, {.size = most});
  int held_back = 0;
  for (int64_t r = 0; r < weight.rows; ++r) {
    const auto [free, own, all] = energies(r, target);
    const auto [size, same, along] = energies(r, limited);
    if (free <= most * own) {
      EXPECT_EQ(size, free) << r;
      continue;
    }
    ++held_back;
    // Additions to weights of fp32, 2^-24 of each.
    EXPECT_NEAR(size, most * own, 1e-5 * own) << r;
    EXPECT_NEAR(along, std::sqrt(size * free), 1e-5 * free) << r;
  }
  EXPECT_EQ(held_back, 31);
}

/// Inputs that have doubled ask for half of the weight, those of half their size for twice of it.
TEST(Asymmetric, RowsKeepWhatTheyAre) {
  const RandomMatrix plain(2000, 32, 1), weight(9, 32, 2);
  for (const float size : {2.0f, 0.5f}) {
    RandomMatrix other = plain;
    for (float& value : other.values) value *= size;
    auto pair = make_input_pair(32);
    add_rows(pair, plain, other, "x");
    const auto gram = mean_gram(pair.quantized), drift = mean_drift(pair);
    const ErrorFactor factor({gram.data(), 32, 32}, 32, 1e-4, "x");
    double mean = 0;
    for (size_t c = 0; c < 32; ++c) mean += double{gram[c * 33]} / 32;
    for (const double most : {0.2, 2.0}) {
      auto moved = weight.values;
      follow_inputs({moved.data(), 9, 32}, {drift.data(), 32, 32}, factor, mean, {.growth = most, .loss = most});
      const double expected = 1 + std::clamp(1 / double{size} - 1, -most, most);
      // λ is 1e-4 of the mean eigenvalue and takes about as much; weights are below 5.
      for (size_t i = 0; i < moved.size(); ++i) EXPECT_NEAR(moved[i], expected * weight.values[i], 1e-3) << i;
    }
  }
}

TEST(Asymmetric, SameInputsMoveNothing) {
  const RandomMatrix x(100, 64, 1), weight(9, 64, 2);
  auto pair = make_input_pair(64);
  add_rows(pair, x, x, "x");
  const auto gram = mean_gram(pair.quantized), drift = mean_drift(pair);
  const ErrorFactor factor({gram.data(), 64, 64}, 32, 0.01, "x");
  auto moved = weight.values;
  follow_inputs({moved.data(), 9, 64}, {drift.data(), 64, 64}, factor, 1, {});
  EXPECT_EQ(moved, weight.values);
}

TEST(Asymmetric, DoesNotDependOnTheThreadCount) {
  const Inputs inputs(600, 160);
  const RandomMatrix weight(200, 160, 5);
  const auto factor = inputs.factor();
  set_threads(1);
  const auto one = inputs.followed(weight, factor);
  const Inputs again(600, 160);
  set_threads(3);
  const Inputs threads(600, 160);
  EXPECT_EQ(inputs.followed(weight, factor), one);
  set_threads(0);
  EXPECT_EQ(threads.pair.drift, again.pair.drift);
}

TEST(Asymmetric, InputsThatAreNotFiniteAreNamed) {
  RandomMatrix x(10, 32, 1);
  const RandomMatrix plain = x;
  x.values[40] = std::nanf("");
  auto pair = make_input_pair(32);
  test::expect_error(ErrorCode::bad_file, {"layers.1.q_proj"}, [&] { add_rows(pair, plain, x, "layers.1.q_proj"); });
}

}  // namespace
}  // namespace w4q::quantize
