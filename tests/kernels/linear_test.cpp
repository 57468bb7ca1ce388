#include "kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/convert.h"
#include "core/parallel.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "kernels/linear/int8_rows.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::gamma;
using test::RandomMatrix;

LinearWeight dense(DType dtype, int64_t n, int64_t k, uint64_t seed) {
  const RandomMatrix values(n, k, seed);
  auto buffer = std::make_shared<Buffer>(static_cast<size_t>(n * k * dtype_bits(dtype) / 8));
  narrow(values.values, dtype, buffer->bytes());
  LinearWeight weight{.name = "dense", .n = n, .k = k, .matrix = {}, .bias = {}};
  weight.matrix =
      LinearWeight::Dense{{.name = "dense.weight", .dtype = dtype, .shape = {n, k}, .bytes = buffer->bytes()}, buffer};
  return weight;
}

LinearWeight packed(int bits, int64_t n, int64_t k, uint64_t seed) {
  const RandomMatrix values(n, k, seed);
  const formats::Scheme scheme{.bits = bits};
  auto linear = std::make_shared<formats::PackedLinear>();
  linear->passes.push_back(
      formats::scheme_row(scheme.family).encode(scheme, values.values, n, k, formats::codebook("nf", bits)));
  LinearWeight weight{.name = "packed", .n = n, .k = k, .matrix = {}, .bias = {}};
  weight.matrix = std::shared_ptr<const formats::PackedLinear>(linear);
  return weight;
}

/// y against the fp64 product of the decoded weights: γ_k·Σ|w||x|, and the rounding of the bias.
void expect_linear(const LinearWeight& weight, const RandomMatrix& x, const RandomMatrix& y) {
  RandomMatrix decoded(weight.n, weight.k, 0);
  decode_rows(weight, 0, weight.n, decoded);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < weight.n; ++c) {
      double exact = weight.bias.empty() ? 0 : weight.bias[static_cast<size_t>(c)], magnitude = std::abs(exact);
      for (int64_t p = 0; p < weight.k; ++p) {
        const double product = double{x.row(r)[p]} * decoded.row(c)[p];
        exact += product;
        magnitude += std::abs(product);
      }
      ASSERT_NEAR(y.row(r)[c], exact, gamma(weight.k + 1) * magnitude) << r << ", " << c;
    }
  }
}

TEST(Linear, AgreesWithFp64ForAnyNumberOfRows) {
  for (const int64_t m : {1, 3, 4, 5, 40}) {
    for (auto weight : {dense(DType::bf16, 150, 77, 1), dense(DType::f16, 65, 64, 2), dense(DType::f32, 1, 130, 3),
                        packed(3, 130, 100, 4), packed(5, 70, 96, 5)}) {
      const RandomMatrix x(m, weight.k, 9);
      RandomMatrix y(m, weight.n, 10);
      linear(weight, x, y);
      expect_linear(weight, x, y);
      weight.bias = RandomMatrix(1, weight.n, 11).values;
      linear(weight, x, y);
      expect_linear(weight, x, y);
    }
  }
}

/// y = W · (x ⊘ s): the same as dividing the input first, but for one rounding more per product on either side.
TEST(Linear, InputScaleDividesTheInput) {
  for (const int64_t m : {2, 40}) {
    LinearWeight plain = packed(4, 70, 100, 3), scaled = plain;
    const auto matrix = std::get<std::shared_ptr<const formats::PackedLinear>>(plain.matrix);
    auto copy = std::make_shared<formats::PackedLinear>();
    copy->passes.push_back(matrix->passes[0].clone());
    for (int64_t c = 0; c < 100; ++c) copy->input_scale.push_back(std::exp2(static_cast<float>(c % 11) - 5.5f));
    scaled.matrix = std::shared_ptr<const formats::PackedLinear>(copy);

    const RandomMatrix x(m, 100, 5);
    RandomMatrix divided = x, y(m, 70, 6), expected(m, 70, 7), decoded(70, 100, 8);
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < 100; ++c) divided.view().row(r)[c] /= copy->input_scale[static_cast<size_t>(c)];
    }
    linear(scaled, x, y);
    linear(plain, divided, expected);
    decode_rows(plain, 0, 70, decoded);
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t o = 0; o < 70; ++o) {
        double magnitude = 0;
        for (int64_t c = 0; c < 100; ++c) magnitude += std::abs(double{divided.row(r)[c]} * decoded.row(o)[c]);
        ASSERT_NEAR(y.row(r)[o], expected.row(r)[o], 2 * gamma(101) * magnitude);
      }
    }
  }
}

/// Two passes of random codes whose inputs are rotated, and scaled before.
std::shared_ptr<formats::PackedLinear> rotated_linear(int64_t n, int64_t k, const formats::Rotation& first,
                                                      const formats::Rotation& second) {
  auto linear = std::make_shared<formats::PackedLinear>();
  for (const auto& [bits, rotation] : {std::pair{4, first}, std::pair{2, second}}) {
    const LinearWeight weight = packed(bits, n, k, static_cast<uint64_t>(bits));
    linear->passes.push_back(std::get<std::shared_ptr<const formats::PackedLinear>>(weight.matrix)->passes[0].clone());
    linear->rotations.emplace_back(rotation, k);
  }
  for (int64_t c = 0; c < k; ++c) linear->input_scale.push_back(std::exp2(static_cast<float>(c % 5) - 2.5f));
  return linear;
}

/// In the rotated basis as in the plain one. Rotating moves rounding errors from one input to others, so the bound is
/// of whole rows: γ of k products and of two rotations, on the norms of the scaled input and of the weights it meets.
TEST(Linear, RotatesTheInput) {
  constexpr formats::Rotation a{64, 42}, b{64, 1042}, row{formats::whole_row, 7};
  for (const int64_t m : {1, 40}) {
    for (const auto& [first, second] : {std::pair{a, a}, std::pair{a, b}, std::pair{row, formats::Rotation{}}}) {
      const int64_t n = 70, k = 200;
      const auto linear_of = rotated_linear(n, k, first, second);
      LinearWeight weight{.name = "rotated", .n = n, .k = k, .matrix = {}, .bias = RandomMatrix(1, n, 11).values};
      weight.matrix = std::shared_ptr<const formats::PackedLinear>(linear_of);
      const RandomMatrix x(m, k, 5);
      RandomMatrix y(m, n, 6), decoded(n, k, 8), reference(n, k, 9);
      linear(weight, x, y);
      decode_rows(weight, 0, n, decoded);
      for (int64_t c = 0; c < n; ++c) {
        formats::decode_linear_row(*linear_of, c, {reference.view().row(c), static_cast<size_t>(k)});
      }
      EXPECT_EQ(decoded.values, reference.values);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          double exact = weight.bias[static_cast<size_t>(c)], input = 0, weights = 0;
          for (int64_t p = 0; p < k; ++p) {
            const double scale = linear_of->input_scale[static_cast<size_t>(p)];
            exact += double{x.row(r)[p]} * decoded.row(c)[p];
            input += std::pow(x.row(r)[p] / scale, 2);
            weights += std::pow(decoded.row(c)[p] * scale, 2);
          }
          ASSERT_NEAR(y.row(r)[c], exact, 2 * gamma(k + 18) * std::sqrt(input * weights)) << r << ", " << c;
        }
      }
    }
  }
}

/// Against the fp64 product of the same integers: γ of k products and of the two scales.
TEST(Linear, Int8ActivationsMultiplyTheirIntegers) {
  const auto& row = formats::scheme_row(formats::SchemeFamily::integer);
  for (const char* scheme : {"int4-g32-f16", "int4-row-bf16-asym", "int8-g64-f16-asym"}) {
    for (const int64_t m : {2, 40}) {
      const int64_t n = 70, k = 200;
      auto packed_linear = std::make_shared<formats::PackedLinear>();
      packed_linear->passes.push_back(
          row.encode(formats::parse_scheme(scheme), RandomMatrix(n, k, 11).values, n, k, {}));
      for (int64_t c = 0; c < k; ++c) packed_linear->input_scale.push_back(std::exp2(static_cast<float>(c % 5) - 2.5f));
      LinearWeight weight{.name = "int8", .n = n, .k = k, .matrix = {}, .bias = RandomMatrix(1, n, 11).values};
      weight.matrix = std::shared_ptr<const formats::PackedLinear>(packed_linear);
      ASSERT_TRUE(takes_int8_activations(weight));
      const RandomMatrix x(m, k, 5);
      RandomMatrix rows = x, y(m, n, 6), decoded(n, k, 8);
      linear_int8(weight, x, y);
      std::vector<float> scales(static_cast<size_t>(m));
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < k; ++c) rows.view().row(r)[c] /= packed_linear->input_scale[static_cast<size_t>(c)];
      }
      quantize_int8(rows, scales, rows.view());
      for (int64_t o = 0; o < n; ++o) {
        row.decode_row(packed_linear->passes.front(), o, {decoded.view().row(o), static_cast<size_t>(k)});
      }
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t o = 0; o < n; ++o) {
          double exact = weight.bias[static_cast<size_t>(o)], magnitude = std::abs(exact);
          for (int64_t p = 0; p < k; ++p) {
            const double product = double{rows.row(r)[p]} * decoded.row(o)[p] * scales[static_cast<size_t>(r)];
            exact += product;
            magnitude += std::abs(product);
          }
          ASSERT_NEAR(y.row(r)[o], exact, gamma(k + 3) * magnitude) << scheme << ", " << r << ", " << o;
        }
      }
    }
  }
}

TEST(Linear, Int8ActivationsNeedIntegers) {
  const LinearWeight kbit = packed(4, 70, 96, 5), wide = dense(DType::bf16, 4, 8, 1);
  EXPECT_FALSE(takes_int8_activations(kbit));
  EXPECT_FALSE(takes_int8_activations(wide));
  const RandomMatrix x(2, 96, 2);
  RandomMatrix y(2, 70, 3);
  test::expect_error(ErrorCode::internal, {"packed", "linear_int8"}, [&] { linear_int8(kbit, x, y); });
}

TEST(Linear, DoesNotDependOnTheThreadCount) {
  const LinearWeight weight = packed(4, 300, 256, 1);
  for (const int64_t m : {1, 33}) {
    const RandomMatrix x(m, 256, 2);
    RandomMatrix one(m, 300, 3), many(m, 300, 4);
    set_threads(1);
    linear(weight, x, one);
    set_threads(5);
    linear(weight, x, many);
    set_threads(0);
    EXPECT_EQ(one.values, many.values) << m;
  }
}

TEST(Linear, RefusesShapesThatDoNotFit) {
  const LinearWeight weight = dense(DType::bf16, 4, 8, 1);
  const RandomMatrix x(2, 7, 2);
  RandomMatrix y(2, 4, 3);
  test::expect_error(ErrorCode::internal, {"dense", "shapes"}, [&] { linear(weight, x, y); });
  RandomMatrix rows(2, 8, 4);
  test::expect_error(ErrorCode::internal, {"rows"}, [&] { decode_rows(weight, 3, 5, rows); });
}

}  // namespace
}  // namespace w4q::kernels
