// Quantizing to small floats: plain, searched, with scales that rows share, and with a factor from outside.
#include "quantize/small_float.h"

#include <gtest/gtest.h>

#include <cmath>

#include "formats/scheme_registry.h"
#include "kbit_samples.h"
#include "quantize/rounding.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

constexpr int64_t float_outputs = 130, float_inputs = 256;

struct FloatMatrix {
  std::vector<float> values = test::sample(test::distributions[0], float_outputs, float_inputs);
  TensorView view() const { return {"w", DType::f32, {float_outputs, float_inputs}, bytes_of(values)}; }
};

QuantizeOptions searched() {
  QuantizeOptions options;
  options.steps = {{StepKind::search_scales}};
  return options;
}

PackedWeight quantized(const FloatMatrix& matrix, std::string_view scheme, const QuantizeOptions& options = {}) {
  return quantizer_row("float").run(matrix.view(), formats::parse_scheme(scheme), options).weight;
}

std::vector<float> decoded(const PackedWeight& weight) {
  std::vector<float> result(static_cast<size_t>(weight.n * weight.k));
  for (int64_t r = 0; r < weight.n; ++r) {
    formats::scheme_row(weight.scheme.family)
        .decode_row(weight, r,
                    std::span(result).subspan(static_cast<size_t>(r * weight.k), static_cast<size_t>(float_inputs)));
  }
  return result;
}

double error(const FloatMatrix& matrix, const PackedWeight& weight) {
  const auto values = decoded(weight);
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) sum += std::pow(double{values[i]} - double{matrix.values[i]}, 2);
  return sum;
}

/// Of normal weights; a power of two leaves little to choose.
TEST(SmallFloat, SearchLessensTheError) {
  const FloatMatrix matrix;
  for (const auto& [name, share] : {std::pair{"nvfp4", 0.9}, {"mxfp4", 1.0}, {"fp8-block128", 1.0}}) {
    EXPECT_LT(error(matrix, quantized(matrix, name, searched())), share * error(matrix, quantized(matrix, name)))
        << name << " " << error(matrix, quantized(matrix, name, searched())) / error(matrix, quantized(matrix, name));
  }
}

TEST(SmallFloat, SearchedScalesAreNeverZero) {
  FloatMatrix matrix;
  for (size_t i = 0; i < 4096; ++i) matrix.values[i] *= 1e-9f;
  std::fill_n(matrix.values.begin() + 8192, 512, 0.0f);
  for (const Scheme& scheme : formats::scheme_row(formats::SchemeFamily::small_float).schemes()) {
    const PackedWeight weight = quantized(matrix, formats::to_string(scheme), searched());
    EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(weight, "w"));
    const auto& scales = weight.plane(PlaneRole::scales);
    for (int64_t i = 0; i < element_count(scales.spec.shape); ++i) {
      ASSERT_GT(formats::load_scale(scales, static_cast<size_t>(i)), 0) << formats::to_string(scheme) << " at " << i;
    }
  }
}

/// Linears that are fused have one factor: what it is does not change which weights are told apart.
TEST(SmallFloat, TakesAFactorFromOutside) {
  const FloatMatrix matrix;
  const PackedWeight own = quantized(matrix, "nvfp4");
  QuantizeOptions options;
  options.tensor_factor = 4 * formats::tensor_factor(own);
  const PackedWeight given = quantized(matrix, "nvfp4", options);
  EXPECT_EQ(formats::tensor_factor(given), options.tensor_factor);
  EXPECT_EQ(decoded(given), decoded(own));  // scales are as fine two octaves below
}

/// What searches of AWQ see is what the quantizer stores.
TEST(SmallFloat, RoundingEqualsQuantizing) {
  FloatMatrix matrix;
  for (const Scheme& scheme : formats::scheme_row(formats::SchemeFamily::small_float).schemes()) {
    std::vector<float> rounded = matrix.values;
    rounding_of(scheme, float_inputs, {}).round({rounded.data(), float_outputs, float_inputs});
    EXPECT_EQ(rounded, decoded(quantized(matrix, formats::to_string(scheme)))) << formats::to_string(scheme);
  }
}

TEST(SmallFloat, RefusesWhatItHasNot) {
  const FloatMatrix matrix;
  QuantizeOptions options;
  options.codebook = "nf";
  test::expect_error(ErrorCode::bad_argument, {"codebook"}, [&] { quantized(matrix, "nvfp4", options); });
  options = {};
  options.steps = {{StepKind::clip}};
  test::expect_error(ErrorCode::bad_argument, {"range to clip"}, [&] { quantized(matrix, "mxfp4", options); });
  FloatMatrix broken;
  broken.values[3 * float_inputs + 5] = NAN;
  test::expect_error(ErrorCode::bad_file, {"w", "3", "5"}, [&] { quantized(broken, "nvfp4"); });
}

}  // namespace
}  // namespace w4q::quantize
