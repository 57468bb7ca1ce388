#include "quantize/statistics.h"

#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "kernels/random_matrix.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using test::RandomMatrix;

InputStatistics statistics_of(MatrixView<const float> rows, bool gram = true) {
  auto result = make_statistics(rows.cols, gram);
  add_rows(result, rows, "x");
  return result;
}

MatrixView<const float> part(const RandomMatrix& all, int64_t begin, int64_t count) {
  return {all.row(begin), count, all.cols, all.cols};
}

TEST(Statistics, AreTheSumsByDefinition) {
  const RandomMatrix x(37, 21, 1);
  const auto sums = statistics_of(x);
  EXPECT_EQ(sums.count, 37);
  for (int64_t i = 0; i < x.cols; ++i) {
    double sum_abs = 0, sum_squares = 0;
    for (int64_t r = 0; r < x.rows; ++r) {
      sum_abs += std::abs(double{x.row(r)[i]});
      sum_squares += double{x.row(r)[i]} * double{x.row(r)[i]};
    }
    EXPECT_DOUBLE_EQ(sums.sum_abs[static_cast<size_t>(i)], sum_abs);
    EXPECT_DOUBLE_EQ(sums.sum_squares[static_cast<size_t>(i)], sum_squares);
    for (int64_t j = i; j < x.cols; ++j) {
      double product = 0, magnitude = 0;
      for (int64_t r = 0; r < x.rows; ++r) {
        product += double{x.row(r)[i]} * double{x.row(r)[j]};
        magnitude += std::abs(double{x.row(r)[i]} * double{x.row(r)[j]});
      }
      // One fp32 dot product over the 37 rows.
      EXPECT_NEAR(sums.gram[static_cast<size_t>(triangle_row(x.cols, i) + j - i)], product,
                  test::gamma(x.rows) * magnitude);
    }
  }
}

TEST(Statistics, TriangleHoldsEveryPairOnce) {
  constexpr int64_t k = 7;
  EXPECT_EQ(triangle_row(k, 0), 0);
  for (int64_t i = 0; i + 1 < k; ++i) EXPECT_EQ(triangle_row(k, i + 1), triangle_row(k, i) + k - i);
  EXPECT_EQ(triangle_row(k, k - 1) + 1, triangle_size(k));
}

/// Rows in pieces of whole chunks go through the same fp32 products, and fp64 sums of a few hundred of these agree to
/// 1e-12.
TEST(Statistics, MergedPartsAreTheWhole) {
  const RandomMatrix x(3 * 512 + 100, 150, 2);
  const auto whole = statistics_of(x);
  auto merged = statistics_of(part(x, 0, 1024));
  merge(merged, statistics_of(part(x, 1024, x.rows - 1024)), "x");
  EXPECT_EQ(merged.count, whole.count);
  const auto expect_close = [](const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12 * 2000);
  };
  expect_close(merged.sum_abs, whole.sum_abs);
  expect_close(merged.sum_squares, whole.sum_squares);
  expect_close(merged.gram, whole.gram);
}

TEST(Statistics, DoNotDependOnThreads) {
  const RandomMatrix x(700, 300, 3);
  set_threads(1);
  const auto one = statistics_of(x);
  set_threads(3);
  const auto three = statistics_of(x);
  set_threads(0);
  EXPECT_EQ(one.sum_abs, three.sum_abs);
  EXPECT_EQ(one.gram, three.gram);
}

TEST(Statistics, MeansOfSums) {
  const RandomMatrix x(40, 9, 4);
  const auto sums = statistics_of(x);
  EXPECT_FLOAT_EQ(sums.mean_abs()[3], static_cast<float>(sums.sum_abs[3] / 40));
  const auto gram = mean_gram(sums);
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_FLOAT_EQ(gram[i * 9 + i], sums.mean_squares()[i]);
    for (size_t j = 0; j < 9; ++j) EXPECT_EQ(gram[i * 9 + j], gram[j * 9 + i]);
  }
  auto as_in_a_file = sums;
  for (double& sum : as_in_a_file.gram) sum = static_cast<float>(sum);
  EXPECT_EQ(mean_gram(as_in_a_file), gram);
  const auto diagonal = mean_gram(statistics_of(x, false));
  EXPECT_FLOAT_EQ(diagonal[10], gram[10]);
  EXPECT_EQ(diagonal[1], 0.0f);
}

TEST(Statistics, OfFewTokensTheDiagonalIsBelieved) {
  std::vector<float> triangle = {4, 2, -1, 5, 3, 6};
  support_by_tokens(triangle, 3, 24 * 3);  // as much noise as not
  EXPECT_EQ(triangle, (std::vector<float>{4, 1, -0.5f, 5, 1.5f, 6}));
  EXPECT_EQ(supported_share(0, 3), 0.0);
  EXPECT_GT(supported_share(24 * 300, 3), 0.99);
  EXPECT_THROW(support_by_tokens(triangle, 2, 5), Error);
}

TEST(Statistics, OfFewTokensLittleIsBelievedOffTheDiagonal) {
  const RandomMatrix x(40, 10, 3);
  auto sums = make_statistics(10, true);
  add_rows(sums, x, "x");
  const auto mean = mean_gram(sums), supported = supported_gram(sums);
  for (size_t at = 0; at < mean.size(); ++at) {
    if (at / 10 == at % 10) {
      EXPECT_EQ(supported[at], mean[at]);
    } else {
      EXPECT_EQ(supported[at], mean[at] / 2);  // 4 tokens an input
    }
  }
}

TEST(Statistics, RefuseWhatDoesNotFit) {
  RandomMatrix x(4, 5, 5);
  auto sums = make_statistics(6, true);
  test::expect_error(ErrorCode::mismatch, {"down_proj", "6", "5"}, [&] { add_rows(sums, x, "down_proj"); });
  test::expect_error(ErrorCode::mismatch, {"6 channels", "5 channels"}, [&] { merge(sums, statistics_of(x), "y"); });
  auto diagonal = make_statistics(5, false);
  test::expect_error(ErrorCode::mismatch, {"with", "without"}, [&] { merge(diagonal, statistics_of(x), "y"); });
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    x.values[7] = bad;
    auto fresh = make_statistics(5, false);
    test::expect_error(ErrorCode::bad_file, {"channel 2", "finite"}, [&] { add_rows(fresh, x, "z"); });
  }
}

}  // namespace
}  // namespace w4q::quantize
