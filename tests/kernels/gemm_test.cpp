#include "kernels/linear/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "core/parallel.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::gamma;
using test::RandomMatrix;

/// Checks C against fp64 within γ_k·Σ|a||b|, with one more term for what C held before.
void expect_product(const RandomMatrix& a, const RandomMatrix& b, bool transposed, const RandomMatrix& before,
                    bool accumulated, MatrixView<const float> c) {
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      double exact = accumulated ? before.row(i)[j] : 0, magnitude = std::abs(exact);
      for (int64_t p = 0; p < a.cols; ++p) {
        const double product = double{a.row(i)[p]} * (transposed ? b.row(j)[p] : b.row(p)[j]);
        exact += product;
        magnitude += std::abs(product);
      }
      ASSERT_NEAR(c.row(i)[j], exact, gamma(a.cols + 1) * magnitude) << i << ", " << j;
    }
  }
}

class GemmShapes : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(GemmShapes, AgreesWithFp64) {
  const auto [m, n, k] = GetParam();
  const RandomMatrix a(m, k, 1), wide(n, k, 2), tall(k, n, 3), before(m, n, 4);
  for (const auto accumulate : {Accumulate::no, Accumulate::yes}) {
    RandomMatrix c = before;
    gemm_nt(a, wide, c, accumulate);
    expect_product(a, wide, true, before, accumulate == Accumulate::yes, c);
    c = before;
    gemm_nn(a, tall, c, accumulate);
    expect_product(a, tall, false, before, accumulate == Accumulate::yes, c);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GemmShapes,
                         testing::Values(std::tuple(1, 1, 1), std::tuple(1, 37, 65), std::tuple(5, 3, 130),
                                         std::tuple(33, 64, 31), std::tuple(128, 65, 64), std::tuple(2, 2, 0)));

TEST(Gemm, WritesOnlyItsBlock) {
  const RandomMatrix a(3, 8, 1), b(2, 8, 2);
  RandomMatrix c(3, 10, 3);
  const RandomMatrix before = c;
  gemm_nt(a, b, MatrixView<float>(c.values.data() + 4, 3, 2, 10));
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t col = 0; col < 10; ++col) {
      if (col == 4 || col == 5) continue;
      EXPECT_EQ(c.row(r)[col], before.row(r)[col]);
    }
  }
}

TEST(Gemm, IsTheSameInsideAndOutsideParallelRegions) {
  const RandomMatrix a(200, 300, 1), b(100, 300, 2);
  RandomMatrix alone(200, 100, 3), inside(200, 100, 4);
  gemm_nt(a, b, alone);
  set_threads(4);
  parallel_for(4, 1, [&](int64_t begin, int64_t) {
    if (begin == 2) gemm_nt(a, b, inside);
  });
  set_threads(0);
  EXPECT_EQ(alone.values, inside.values);
}

TEST(Gemm, RefusesShapesThatDoNotFit) {
  const RandomMatrix a(2, 3, 1), b(4, 5, 2);
  RandomMatrix c(2, 4, 3);
  test::expect_error(ErrorCode::internal, {"shapes"}, [&] { gemm_nt(a, b, c); });
  test::expect_error(ErrorCode::internal, {"shapes"}, [&] { gemm_nn(a, b, c); });
}

}  // namespace
}  // namespace w4q::kernels
