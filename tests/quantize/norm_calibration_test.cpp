#include "quantize/norm_calibration.h"

#include <cmath>

#include "formats/rotated.h"
#include "kbit_samples.h"
#include "kernels/dequantize/dequantize.h"
#include "quantize/awq.h"
#include "quantize/rounding.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;

constexpr int64_t outputs = 24, inputs = 224;  // groups of 64: three whole ones and one of 32

/// A weight, and the Gram matrix of inputs that hang together.
struct Problem {
  std::vector<float> weight = test::sample(test::distributions[1], outputs, inputs);
  std::vector<float> gram = std::vector<float>(inputs * inputs);

  Problem() {
    constexpr int64_t rows = 300;
    std::vector<double> x(inputs);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < inputs; ++i) {
        const double noise = random_normal(5, static_cast<uint64_t>(row * inputs + i));
        x[static_cast<size_t>(i)] = noise + (i > 0 ? 0.8 * x[static_cast<size_t>(i - 1)] : 0);
      }
      for (int64_t i = 0; i < inputs; ++i) {
        for (int64_t j = 0; j < inputs; ++j) {
          gram[static_cast<size_t>(i * inputs + j)] +=
              static_cast<float>(x[static_cast<size_t>(i)] * x[static_cast<size_t>(j)] / rows);
        }
      }
    }
  }

  MatrixView<const float> weights() const { return {weight.data(), outputs, inputs}; }
  MatrixView<const float> gram_view() const { return {gram.data(), inputs, inputs}; }

  PackedWeight packed(std::string_view scheme) const {
    const auto parsed = formats::parse_scheme(scheme);
    return rounding_quantizer(parsed).run({"w", DType::f32, {outputs, inputs}, bytes_of(weight)}, parsed, {}).weight;
  }

  double error(const PackedWeight& packed) const {
    std::vector<float> rest(weight.size());
    kernels::dequantize_rows(packed, 0, {rest.data(), outputs, inputs});
    for (size_t i = 0; i < rest.size(); ++i) rest[i] = weight[i] - rest[i];
    return output_error({rest.data(), outputs, inputs}, gram_view());
  }
};

/// At the least error no norm can move either way. The steps are far above the rounding of f32 norms.
TEST(NormCalibration, NoNormCanDoBetter) {
  const Problem problem;
  PackedWeight packed = problem.packed("rotated3-d64-f32");
  const double plain = problem.error(packed);
  EXPECT_EQ(calibrate_norms(packed, problem.weights(), problem.gram_view(), 0), outputs);
  const double least = problem.error(packed);
  EXPECT_LT(least, 0.95 * plain);
  formats::Plane& norms = packed.plane(formats::PlaneRole::scales);
  for (const size_t index : {0u, 3u, 41u, 95u}) {
    const float norm = formats::load_scale(norms, index);
    for (const double factor : {0.99, 1.01}) {
      formats::put_scale(norms, index, formats::rotated_scale(norm * factor, formats::ScaleType::f32).bits);
      EXPECT_GT(problem.error(packed), least) << index;
    }
    formats::put_scale(norms, index, formats::rotated_scale(norm, formats::ScaleType::f32).bits);
  }
}

TEST(NormCalibration, NarrowNormsNeverGetWorse) {
  const Problem problem;
  for (const char* scheme : {"rotated4-d64", "rotated2-d32-e4m4", "rotated4-row"}) {
    PackedWeight packed = problem.packed(scheme);
    const PackedWeight before = problem.packed(scheme);
    const double plain = problem.error(packed);
    EXPECT_GT(calibrate_norms(packed, problem.weights(), problem.gram_view(), 1e-3), 0) << scheme;
    EXPECT_LT(problem.error(packed), plain) << scheme;
    const auto role = formats::PlaneRole::codes;
    EXPECT_TRUE(std::ranges::equal(packed.plane(role).bytes.bytes(), before.plane(role).bytes.bytes())) << scheme;
  }
}

/// Rows and channels of nothing: no norm is decided by them, and none becomes other than a number.
TEST(NormCalibration, WhatIsSilentStays) {
  Problem problem;
  std::fill_n(problem.weight.begin(), inputs, 0.0f);
  for (int64_t i = 0; i < inputs; ++i) {
    for (int64_t j = 64; j < 128; ++j) {
      problem.gram[static_cast<size_t>(i * inputs + j)] = problem.gram[static_cast<size_t>(j * inputs + i)] = 0;
    }
  }
  PackedWeight packed = problem.packed("rotated4-d64");
  const PackedWeight before = problem.packed("rotated4-d64");
  EXPECT_EQ(calibrate_norms(packed, problem.weights(), problem.gram_view(), 1e-3), outputs - 1);
  const auto norm = [](const PackedWeight& weight, size_t index) {
    return formats::load_scale(weight.plane(formats::PlaneRole::scales), index);
  };
  for (size_t row = 0; row < outputs; ++row) EXPECT_EQ(norm(packed, row * 4 + 1), norm(before, row * 4 + 1)) << row;
  EXPECT_EQ(norm(packed, 0), 0.0f);
}

}  // namespace
}  // namespace w4q::quantize
