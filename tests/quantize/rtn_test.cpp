#include "quantize/rtn.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <limits>

#include "core/convert.h"
#include "core/parallel.h"
#include "formats/scheme_registry.h"
#include "kbit_samples.h"
#include "quantize/integer_simd.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::parse_scheme;
using formats::Scheme;

constexpr int64_t ragged_outputs = 9;
constexpr int64_t ragged_inputs = 301;

QuantizeOptions with(Clip clip) {
  QuantizeOptions options;
  if (clip == Clip::mse) options.steps = {{StepKind::clip}};
  return options;
}

QuantizeResult quantize(const std::vector<float>& values, const Scheme& scheme, Clip clip = Clip::min_max) {
  return quantizer_row("rtn").run({"layers.0.up", DType::f32, {ragged_outputs, ragged_inputs}, bytes_of(values)},
                                  scheme, with(clip));
}

std::vector<Scheme> schemes() {
  std::vector<Scheme> result;
  for (const Scheme& scheme : formats::scheme_row(formats::SchemeFamily::integer).schemes()) {
    if (quantizer_row("rtn").accepts(scheme)) result.push_back(scheme);
  }
  return result;
}

double squared_error(const std::vector<float>& values, const std::vector<float>& decoded) {
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double difference = static_cast<double>(values[i]) - static_cast<double>(decoded[i]);
    sum += difference * difference;
  }
  return sum;
}

TEST(Rtn, FakeQuantizingIsQuantizingAndDecoding) {
  for (const Scheme& scheme : schemes()) {
    for (const auto& distribution : test::distributions) {
      const std::vector<float> values = test::sample(distribution, ragged_outputs, ragged_inputs);
      for (const Clip clip : {Clip::min_max, Clip::mse}) {
        std::vector<float> rounded = values;
        fake_quantize(scheme, {rounded.data(), ragged_outputs, ragged_inputs}, clip);
        EXPECT_EQ(rounded, test::decode(quantize(values, scheme, clip).weight))
            << to_string(scheme) << " " << distribution.name;
      }
    }
  }
}

TEST(Rtn, FakeQuantizesColumnsOfALargerMatrix) {
  const Scheme scheme = parse_scheme("int4-g64-f16-asym");
  const std::vector<float> values = test::sample(test::distributions[0], ragged_outputs, ragged_inputs);
  const std::vector<float> whole = test::decode(quantize(values, scheme).weight);
  std::vector<float> part = values;
  fake_quantize(scheme, {part.data() + 64, ragged_outputs, 128, ragged_inputs});
  for (size_t i = 0; i < part.size(); ++i) {
    const bool inside = i % ragged_inputs >= 64 && i % ragged_inputs < 192;
    EXPECT_EQ(part[i], inside ? whole[i] : values[i]);
  }
}

TEST(Rtn, BytesDoNotDependOnThreadsOrInstructionSet) {
  const std::vector<float> values = test::sample(test::distributions[0], ragged_outputs, ragged_inputs);
  for (const Scheme& scheme : schemes()) {
    const PackedWeight expected = quantize(values, scheme, Clip::mse).weight;
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
      hwy::SetSupportedTargetsForTest(target);
      EXPECT_TRUE(bytes_equal(quantize(values, scheme, Clip::mse).weight, expected))
          << to_string(scheme) << " " << hwy::TargetName(target);
    }
    hwy::SetSupportedTargetsForTest(0);
    for (const int count : {1, 2, 5}) {
      set_threads(count);
      EXPECT_TRUE(bytes_equal(quantize(values, scheme, Clip::mse).weight, expected)) << to_string(scheme);
    }
    set_threads(0);
  }
}

/// A group's own range is among the candidates, so no group gets worse (but for the rounding of its error to fp32),
/// and where few weights stretch the range of many, clipping them pays: by a tenth at least of the squared error.
TEST(Rtn, ClippingLessensTheError) {
  for (const Scheme& scheme : schemes()) {
    for (std::string_view name : {"normal", "uniform", "heavy tail", "negative", "constant"}) {
      const auto distribution = std::ranges::find(test::distributions, name, &test::Distribution::name);
      const std::vector<float> values = test::sample(*distribution, ragged_outputs, ragged_inputs);
      const double plain = squared_error(values, test::decode(quantize(values, scheme).weight));
      const double clipped = squared_error(values, test::decode(quantize(values, scheme, Clip::mse).weight));
      EXPECT_LE(clipped, plain * (1 + 1e-6)) << to_string(scheme) << " " << name;
      if (name == "normal" && scheme.bits <= 3 && scheme.block == 64) {
        EXPECT_LT(clipped, 0.9 * plain) << to_string(scheme);
      }
    }
  }
}

TEST(Rtn, CountsWhatHappensToGroups) {
  std::vector<float> values(ragged_outputs * ragged_inputs, 0.0f);
  values[0] = 1e9f;                        // row 0, group 0: larger than 15 steps of 65504
  values[128] = 1e-6f;                     // row 0, group 1: a subnormal scale
  values[2 * ragged_inputs + 5] = -0.25f;  // row 2, group 0
  const auto result = quantize(values, parse_scheme("int4-g128-f16-asym"));
  EXPECT_EQ(result.stats.blocks, ragged_outputs * 3);
  EXPECT_EQ(result.stats.zero_blocks, ragged_outputs * 3 - 3);
  EXPECT_EQ(result.stats.saturated_scales, 1);
  EXPECT_EQ(result.stats.subnormal_scales, 1);
}

TEST(Rtn, RefusesTheFirstValueThatIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values = test::sample(test::distributions[0], ragged_outputs, ragged_inputs);
    values[3 * ragged_inputs + 300] = bad;
    values[7 * ragged_inputs + 2] = bad;
    test::expect_error(ErrorCode::bad_file, {"layers.0.up", "row 3, column 300"},
                       [&] { quantize(values, parse_scheme("int4-g128-f16")); });
  }
}

TEST(Rtn, RefusesSchemesAndOptionsOfOthers) {
  const std::vector<float> values(ragged_outputs * ragged_inputs, 1.0f);
  const TensorView view{"w", DType::f32, {ragged_outputs, ragged_inputs}, bytes_of(values)};
  for (std::string_view name : {"kbit4-b32-e4m4", "lut4-b64-f32", "int4-g128-f16-actorder"}) {
    test::expect_error(ErrorCode::bad_argument, {"rtn cannot quantize to", name},
                       [&] { quantizer_row("rtn").run(view, parse_scheme(name), {}); });
    std::vector<float> copy = values;
    test::expect_error(ErrorCode::bad_argument, {name}, [&] {
      fake_quantize(parse_scheme(name), {copy.data(), ragged_outputs, ragged_inputs});
    });
  }
  QuantizeOptions options;
  options.bnb_compatible = true;
  test::expect_error(ErrorCode::bad_argument, {"bitsandbytes"},
                     [&] { quantizer_row("rtn").run(view, parse_scheme("int4-g128-f16"), options); });
  test::expect_error(ErrorCode::bad_argument, {"kbit searches no range"},
                     [&] { quantizer_row("kbit").run(view, parse_scheme("kbit4-b32-e4m4"), with(Clip::mse)); });
}

}  // namespace
}  // namespace w4q::quantize
