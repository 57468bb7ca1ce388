#include "kernels/sampling/logits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

double exact_log_sum_exp(std::span<const float> row) {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const float x : row) largest = std::max(largest, double{x});
  for (const float x : row) sum += std::exp(x - largest);
  return largest + std::log(sum);
}

TEST(Logits, LogSoftmaxAgreesWithFp64) {
  for (const int64_t vocab : {1, 2, 15, 17, 1000, 151936}) {
    for (const float spread : {0.01f, 1.0f, 30.0f}) {
      RandomMatrix row(1, vocab, 1);
      for (auto& x : row.values) x = x * spread - 50;
      // The promise of logits.h; measured 7.6e-8 at most.
      EXPECT_NEAR(log_sum_exp(row.values), exact_log_sum_exp(row.values), 1e-6) << vocab;
      EXPECT_NEAR(log_softmax_at(row.values, vocab - 1), row.values.back() - exact_log_sum_exp(row.values), 1e-6);
    }
  }
}

TEST(Logits, ArgmaxTakesTheLowestIndexOnTies) {
  std::vector<float> row(100, 1.0f);
  EXPECT_EQ(argmax(row), 0);
  row[70] = row[33] = 2.0f;
  EXPECT_EQ(argmax(row), 33);
  EXPECT_EQ(argmax(std::vector<float>{-3.0f}), 0);
}

TEST(Logits, TopFiveIsDescendingAndStable) {
  EXPECT_EQ(top_five(std::vector<float>{1, 9, 3, 9, 5, 4, 3, 0}), (std::array<int64_t, 5>{1, 3, 4, 5, 2}));
  EXPECT_EQ(top_five(std::vector<float>{2, 3}), (std::array<int64_t, 5>{1, 0, -1, -1, -1}));
}

TEST(Logits, CompareAgreesWithFp64) {
  for (const int64_t vocab : {7, 1024, 50257}) {
    RandomMatrix a(1, vocab, 1), b(1, vocab, 2);
    for (size_t i = 0; i < a.values.size(); ++i) {
      a.values[i] *= 3;
      b.values[i] = a.values[i] + 0.2f * b.values[i] + 5;
    }
    const double lse_a = exact_log_sum_exp(a.values), lse_b = exact_log_sum_exp(b.values);
    double kl = 0;
    for (size_t i = 0; i < a.values.size(); ++i) {
      kl += std::exp(a.values[i] - lse_a) * ((a.values[i] - lse_a) - (b.values[i] - lse_b));
    }
    const auto result = compare_logits(a.values, b.values, 3);
    EXPECT_NEAR(result.nll_a, lse_a - a.values[3], 1e-6);
    EXPECT_NEAR(result.nll_b, lse_b - b.values[3], 1e-6);
    EXPECT_NEAR(result.kl, kl, 1e-6);  // the promise of logits.h; measured 2.5e-7
    EXPECT_EQ(result.same_top1, argmax(a.values) == argmax(b.values));
  }
}

TEST(Logits, EqualRowsDifferByNothing) {
  const RandomMatrix a(1, 1000, 1);
  const auto result = compare_logits(a.values, a.values, 5);
  EXPECT_EQ(result.kl, 0);
  EXPECT_EQ(result.nll_a, result.nll_b);
  EXPECT_TRUE(result.same_top1);
  EXPECT_EQ(result.top5_overlap, 5);
}

TEST(Logits, RefusesIdsOutside) {
  const std::vector<float> row(10);
  test::expect_error(ErrorCode::bad_argument, {"10", "outside"}, [&] { log_softmax_at(row, 10); });
  test::expect_error(ErrorCode::bad_argument, {"-1", "outside"}, [&] { compare_logits(row, row, -1); });
}

}  // namespace
}  // namespace w4q::kernels
