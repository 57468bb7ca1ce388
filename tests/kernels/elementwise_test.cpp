#include "kernels/elementwise/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>

#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::gamma;
using test::RandomMatrix;

TEST(RmsNorm, AgreesWithFp64) {
  for (const int64_t width : {1, 8, 31, 256, 515}) {
    const RandomMatrix x(3, width, 1), weight(1, width, 2);
    RandomMatrix y(3, width, 3);
    rms_norm(x, weight.values, 1e-5f, y);
    for (int64_t r = 0; r < 3; ++r) {
      double squares = 0;
      for (int64_t c = 0; c < width; ++c) squares += double{x.row(r)[c]} * x.row(r)[c];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
      for (int64_t c = 0; c < width; ++c) {
        const double exact = weight.values[static_cast<size_t>(c)] * x.row(r)[c] * scale;
        // Half the relative error of the sum of squares, and six roundings behind it.
        ASSERT_NEAR(y.row(r)[c], exact, std::abs(exact) * (gamma(width) / 2 + gamma(6)));
      }
    }
  }
}

TEST(RmsNorm, OfHeadsEqualsOneRowPerHead) {
  RandomMatrix heads(2, 3 * 48, 1);
  const RandomMatrix weight(1, 48, 2);
  RandomMatrix expected(6, 48, 3);
  rms_norm(MatrixView<const float>(heads.values.data(), 6, 48), weight.values, 1e-6f, expected);
  rms_norm_heads(heads, weight.values, 1e-6f);
  EXPECT_EQ(heads.values, expected.values);
}

TEST(RotateHeads, TurnsPairsAndLeavesTheRest) {
  const int64_t head_dim = 50, half = 19;  // 38 of 50 channels rotate
  RandomMatrix x(2, 3 * head_dim, 1);
  const RandomMatrix before = x, cosine(2, half, 2), sine(2, half, 3);
  rotate_heads(x, head_dim, cosine, sine);
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t head = 0; head < 3; ++head) {
      const float* in = before.row(r) + head * head_dim;
      const float* out = x.row(r) + head * head_dim;
      for (int64_t i = 0; i < half; ++i) {
        const float c = cosine.row(r)[i], s = sine.row(r)[i];
        // Rounded product by product, so that every instruction set gives these bits.
        const float first_c = in[i] * c, second_s = in[i + half] * s;
        const float second_c = in[i + half] * c, first_s = in[i] * s;
        EXPECT_EQ(out[i], first_c - second_s);
        EXPECT_EQ(out[i + half], second_c + first_s);
      }
      for (int64_t i = 2 * half; i < head_dim; ++i) EXPECT_EQ(out[i], in[i]);
    }
  }
}

TEST(SiluMultiply, AgreesWithFp64) {
  const int64_t width = 1003;
  RandomMatrix gate(1, width, 1);
  const RandomMatrix up(1, width, 2);
  for (auto& value : gate.values) value *= 10;
  const RandomMatrix before = gate;
  silu_multiply(gate, up);
  for (size_t i = 0; i < gate.values.size(); ++i) {
    const double x = before.values[i], exact = x / (1 + std::exp(-x)) * up.values[i];
    // e^−x within 1 ulp of the vector exponential and half an ulp of each of three roundings; 4·2^-23 in all.
    EXPECT_NEAR(gate.values[i], exact, std::abs(exact) * 4 * 0x1p-23);
  }
}

TEST(SiluMultiply, StaysFiniteAtTheEnds) {
  RandomMatrix gate(1, 4, 1);
  RandomMatrix up(1, 4, 2);
  gate.values = {-1000.0f, -90.0f, 1000.0f, 0.0f};
  up.values = {1, 1, 1, 1};
  silu_multiply(gate, up);
  EXPECT_NEAR(gate.values[0], 0, 1e-35);
  EXPECT_NEAR(gate.values[1], 0, 1e-35);
  EXPECT_EQ(gate.values[2], 1000.0f);
  EXPECT_EQ(gate.values[3], 0.0f);
}

TEST(AddRows, Adds) {
  RandomMatrix x(5, 37, 1);
  const RandomMatrix before = x, y(5, 37, 2);
  add_rows(x, y);
  for (size_t i = 0; i < x.values.size(); ++i) EXPECT_EQ(x.values[i], before.values[i] + y.values[i]);
}

TEST(Elementwise, RefusesShapesThatDoNotFit) {
  RandomMatrix x(2, 10, 1), y(2, 9, 2);
  test::expect_error(ErrorCode::internal, {"add_rows"}, [&] { add_rows(x, y); });
  test::expect_error(ErrorCode::internal, {"rms_norm"}, [&] { rms_norm(x, y.values, 1e-6f, x); });
  test::expect_error(ErrorCode::internal, {"rotate_heads"}, [&] { rotate_heads(x, 3, y, y); });
}

}  // namespace
}  // namespace w4q::kernels
