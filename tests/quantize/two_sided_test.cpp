// Error feedback along both sides of a weight.
#include <gtest/gtest.h>

#include <numeric>

#include "core/parallel.h"
#include "feedback_samples.h"
#include "io/checkpoint.h"
#include "kernels/linear/gemm.h"
#include "quantize/kbit_panel.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::Scheme;
using formats::SchemeFamily;
using test::Layer;

constexpr double sides_damping = 0.01;

/// A layer, and what errors of its outputs cost.
struct Sides {
  Sides(int64_t n, int64_t k, uint64_t seed) : layer(n, k), outputs(test::sample_gram(n, 4 * n, seed)) {}
  explicit Sides(Layer layer_, std::vector<float> outputs_) : layer(std::move(layer_)), outputs(std::move(outputs_)) {}

  MatrixView<const float> outputs_view() const { return {outputs.data(), layer.n, layer.n}; }

  QuantizeResult round(const Scheme& scheme, bool both, QuantizeOptions options = {}) const {
    const ErrorFactor inputs(layer.gram_view(), feedback_block(scheme, layer.k), sides_damping, "w");
    const ErrorFactor costs(outputs_view(), output_block(scheme), sides_damping, "w");
    std::vector<float> squares;
    for (int64_t c = 0; c < layer.k; ++c) squares.push_back(layer.gram_view().row(c)[c]);
    CalibratedInput input{.mean_squares = squares, .feedback = &inputs, .gram = layer.gram_view()};
    if (both) {
      input.outputs = &costs;
      input.output_gram = outputs_view();
    }
    options.input = &input;
    return layer.plain(scheme, options);
  }

  /// tr(H_O E H_I Eᵀ), both damped.
  double objective(const formats::PackedWeight& packed) const {
    const auto values = test::decode(packed);
    const int64_t n = layer.n, k = layer.k;
    std::vector<float> errors(values.size()), by_input(values.size()), by_both(values.size());
    for (size_t i = 0; i < errors.size(); ++i) errors[i] = values[i] - layer.weight.values[i];
    const auto damped = [](MatrixView<const float> gram) {
      std::vector<float> result(gram.data, gram.data + gram.rows * gram.cols);
      float mean = 0;
      for (int64_t i = 0; i < gram.rows; ++i) mean += gram.row(i)[i] / static_cast<float>(gram.rows);
      for (int64_t i = 0; i < gram.rows; ++i) result[static_cast<size_t>(i * gram.rows + i)] += sides_damping * mean;
      return result;
    };
    const auto inputs = damped(layer.gram_view()), costs = damped(outputs_view());
    kernels::gemm_nn({errors.data(), n, k}, {inputs.data(), k, k}, {by_input.data(), n, k});
    kernels::gemm_nn({costs.data(), n, n}, {by_input.data(), n, k}, {by_both.data(), n, k});
    double sum = 0;
    for (size_t i = 0; i < errors.size(); ++i) sum += double{errors[i]} * double{by_both[i]};
    return sum;
  }

  Layer layer;
  std::vector<float> outputs;
};

QuantizeOptions trying(const Scheme& scheme) {
  QuantizeOptions options;
  if (scheme.family == SchemeFamily::kbit) return test::searching();
  options.steps = {{scheme.family == SchemeFamily::integer ? StepKind::clip : StepKind::search_scales}};
  return options;
}

/// Outputs that cost the same, each by itself: nothing couples rows.
TEST(TwoSided, IsOneSidedWhereOutputsAreApart) {
  Sides sides(70, 96, 5);
  std::ranges::fill(sides.outputs, 0.0f);
  for (size_t i = 0; i < 70; ++i) sides.outputs[i * 71] = 1;
  for (const Scheme& scheme : test::fed_back_schemes()) {
    const auto options = trying(scheme);
    EXPECT_TRUE(bytes_equal(sides.round(scheme, true, options).weight, sides.round(scheme, false, options).weight))
        << to_string(scheme);
  }
}

/// Measured: .28 … .49 of one-sided feedback.
TEST(TwoSided, LessensTheObjectiveOfEveryScheme) {
  const Sides sides(80, 168, 5);
  for (const Scheme& scheme : test::fed_back_schemes()) {
    for (const bool tries : {false, true}) {
      const auto options = tries ? trying(scheme) : QuantizeOptions{};
      const auto both = sides.round(scheme, true, options);
      EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(both.weight, "w"));
      const double share = sides.objective(both.weight) / sides.objective(sides.round(scheme, false, options).weight);
      EXPECT_LT(share, 0.55) << to_string(scheme) << " " << tries;
    }
  }
}

/// The sum over several matrices; measured: .32 … .33 of one-sided feedback.
TEST(TwoSided, LessensTheObjectiveOnAverage) {
  for (const char* name : {"kbit3-b32-e4m4", "int3-g128-f16", "rotated3-d128"}) {
    const Scheme scheme = formats::parse_scheme(name);
    double one = 0, two = 0;
    for (const uint64_t seed : {11, 12}) {
      const Sides sides(130, 200, seed);
      one += sides.objective(sides.round(scheme, false, trying(scheme)).weight);
      two += sides.objective(sides.round(scheme, true, trying(scheme)).weight);
    }
    EXPECT_LT(two, 0.4 * one) << name << " " << two / one;
  }
}

/// Outputs of which those that are alike stand in several strips of 128.
Sides apart(int64_t k, uint64_t seed) {
  constexpr int64_t n = 300, stride = 37;
  Sides sides(n, k, seed);
  std::vector<float> mixed;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) mixed.push_back(sides.outputs_view().row(i * stride % n)[j * stride % n]);
  }
  sides.outputs = std::move(mixed);
  return sides;
}

QuantizeOptions sweeping_rings() {
  QuantizeOptions options;
  options.steps = parse_steps("feedback → sweeps");
  return options;
}

/// Rows of a ring are rounded at once, so that only other strips can make up for it. Measured: to .39 … .48,
/// and sweeps to .90 … .95 of that.
TEST(TwoSidedRings, LessenTheObjectiveAndSoDoSweeps) {
  const Sides sides = apart(100, 5);
  for (const Scheme& scheme : formats::scheme_row(SchemeFamily::trellis).schemes()) {
    const double one = sides.objective(sides.round(scheme, false).weight);
    const auto both = sides.round(scheme, true), swept = sides.round(scheme, true, sweeping_rings());
    EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(swept.weight, "w"));
    EXPECT_LT(sides.objective(both.weight), 0.55 * one)
        << to_string(scheme) << " " << sides.objective(both.weight) / one;
    EXPECT_LT(sides.objective(swept.weight), 0.96 * sides.objective(both.weight))
        << to_string(scheme) << " " << sides.objective(swept.weight) / sides.objective(both.weight);
  }
}

TEST(TwoSidedRings, AreOneSidedWhereOutputsAreApart) {
  Sides sides(140, 70, 5);
  std::ranges::fill(sides.outputs, 0.0f);
  for (size_t i = 0; i < 140; ++i) sides.outputs[i * 141] = 1;
  const Scheme scheme = formats::parse_scheme("trellis3-w8");
  for (const auto& options : {QuantizeOptions{}, sweeping_rings()}) {
    EXPECT_TRUE(bytes_equal(sides.round(scheme, true, options).weight, sides.round(scheme, false, options).weight));
  }
}

TEST(TwoSidedRings, BytesDoNotDependOnThreads) {
  const Sides sides = apart(70, 6);
  const Scheme scheme = formats::parse_scheme("trellis2-w8");
  set_threads(1);
  const auto one = sides.round(scheme, true, sweeping_rings());
  set_threads(3);
  const auto three = sides.round(scheme, true, sweeping_rings());
  set_threads(0);
  EXPECT_TRUE(bytes_equal(one.weight, three.weight));
}

/// Each row of the second strip makes up for one of the first, beside what rounding it misses by itself.
TEST(TwoSidedRings, MoveAStripByWhatTheErrorsBeforeAreWorth) {
  constexpr int64_t n = 256, k = 40, half = 128;
  Sides sides(n, k, 5);
  std::ranges::fill(sides.outputs, 0.0f);
  for (int64_t r = 0; r < half; ++r) {
    const auto at = [&](int64_t i, int64_t j) -> float& { return sides.outputs[static_cast<size_t>(i * n + j)]; };
    at(r, r) = 2, at(r + half, r + half) = 1;
    at(r, r + half) = at(r + half, r) = 0.9f;
  }
  const auto values = test::decode(sides.round(formats::parse_scheme("trellis4-w8"), true).weight);
  double together = 0, size = 0;
  for (int64_t r = 0; r < half; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      const auto first = static_cast<size_t>(r * k + c), second = first + static_cast<size_t>(half * k);
      const double left = values[first] - sides.layer.weight.values[first],
                   right = values[second] - sides.layer.weight.values[second];
      together += left * right, size += left * left;
    }
  }
  // −H_ab / H_bb of what the first strip misses, H_bb with its damping of .015.
  EXPECT_NEAR(together / size, -0.9 / 1.015, 0.05);
}

QuantizeOptions sweeping(const Scheme& scheme) {
  auto options = trying(scheme);
  options.steps.add(parse_steps("feedback → sweeps"));
  return options;
}

/// Sweeps go on lessening the objective of both sides; measured: to .886 … .992 of what feedback leaves.
TEST(TwoSided, SweepsLessenTheObjectiveOfEveryScheme) {
  const Sides sides(80, 168, 5);
  for (const Scheme& scheme : test::fed_back_schemes()) {
    const auto swept = sides.round(scheme, true, sweeping(scheme));
    EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(swept.weight, "w"));
    const double share =
        sides.objective(swept.weight) / sides.objective(sides.round(scheme, true, trying(scheme)).weight);
    EXPECT_LT(share, 1.0) << to_string(scheme);
  }
}

TEST(TwoSided, SweepsAreOneSidedWhereOutputsAreApart) {
  Sides sides(70, 96, 5);
  std::ranges::fill(sides.outputs, 0.0f);
  for (size_t i = 0; i < 70; ++i) sides.outputs[i * 71] = 1;
  for (const char* name : {"kbit3-b32-e4m4", "int4-g32-f16-asym", "rotated3-d32"}) {
    const Scheme scheme = formats::parse_scheme(name);
    const auto options = sweeping(scheme);
    EXPECT_TRUE(bytes_equal(sides.round(scheme, true, options).weight, sides.round(scheme, false, options).weight));
  }
}

/// Row by row in the order of the factor of outputs: each by one-sided feedback towards W_i − R_i, R_i = Σ_{p<i} N_pi E_p.
/// Products of other shapes round otherwise, so that near ties may fall otherwise, and what follows from them.
TEST(TwoSided, IsOneSidedFeedbackOfMovedRows) {
  const Sides sides(70, 300, 5);
  const Scheme scheme = formats::parse_scheme("int4-g32-f16");
  const auto both = test::decode(sides.round(scheme, true).weight);
  const ErrorFactor inputs(sides.layer.gram_view(), 32, sides_damping, "w"),
      costs(sides.outputs_view(), 1, sides_damping, "w");
  const CalibratedInput input{.mean_squares = {}, .feedback = &inputs};
  QuantizeOptions options;
  options.input = &input;
  std::vector<std::vector<float>> errors;
  size_t different = 0;
  for (int64_t p = 0; p < 70; ++p) {
    const float* weights = sides.layer.weight.row(costs.order()[static_cast<size_t>(p)]);
    std::vector<float> target(weights, weights + 300);
    for (size_t c = 0; c < target.size(); ++c) {
      double moved = target[c];
      for (int64_t q = 0; q < p; ++q)
        moved -= double{costs.coupling().row(p)[q]} * double{errors[static_cast<size_t>(q)][c]};
      target[c] = static_cast<float>(moved);
    }
    const auto row =
        test::decode(quantize_with_feedback({"w", DType::f32, {1, 300}, bytes_of(target)}, scheme, options).weight);
    errors.emplace_back();
    for (size_t c = 0; c < target.size(); ++c) {
      errors.back().push_back(row[c] - weights[c]);
      different += row[c] != both[static_cast<size_t>(costs.order()[static_cast<size_t>(p)]) * 300 + c] ? 1 : 0;
    }
  }
  EXPECT_LT(different, 70u * 300u / 100);  // measured: 0
}

TEST(TwoSided, BytesDoNotDependOnThreads) {
  const Sides sides(200, 330, 5);
  for (const char* name : {"kbit3-b32-e4m4", "int4-g32-f16-asym", "int3-row-f16", "rotated3-d32"}) {
    const Scheme scheme = formats::parse_scheme(name);
    set_threads(1);
    const auto one = sides.round(scheme, true, trying(scheme));
    set_threads(3);
    const auto three = sides.round(scheme, true, trying(scheme));
    set_threads(0);
    EXPECT_TRUE(bytes_equal(one.weight, three.weight)) << name;
    EXPECT_EQ(one.stats.blocks, three.stats.blocks);
    set_threads(1);
    const auto swept_by_one = sides.round(scheme, true, sweeping(scheme));
    set_threads(3);
    const auto swept_by_three = sides.round(scheme, true, sweeping(scheme));
    set_threads(0);
    EXPECT_TRUE(bytes_equal(swept_by_one.weight, swept_by_three.weight)) << name;
  }
}

TEST(TwoSided, RefusesAFactorOfOtherOutputs) {
  const Sides sides(8, 64, 5);
  const ErrorFactor inputs(sides.layer.gram_view(), 32, sides_damping, "w");
  const ErrorFactor costs(sides.layer.gram_view(), 1, sides_damping, "w");
  const CalibratedInput input{.mean_squares = {}, .feedback = &inputs, .outputs = &costs};
  QuantizeOptions options;
  options.input = &input;
  test::expect_error(ErrorCode::bad_argument, {"w", "8 outputs", "64"},
                     [&] { sides.layer.plain(formats::parse_scheme("int4-g32-f16"), options); });
}

/// Sixteen scales at a time find what one after the other do, ties and rows of zeros too.
TEST(PanelOfOneRow, ChoosesTheScaleOfARowAmongOthers) {
  const std::vector<float> codebook = {-1, -0.5f, -0.2f, 0, 0.1f, 0.3f, 0.6f, 1};
  const KbitLevels levels(codebook);
  const test::RandomMatrix values(32, panel_rows, 3);
  const std::vector<float> importance(32, 1.0f), coupling(32 * 32, 0.05f);
  for (const auto type : {formats::ScaleType::e4m4, formats::ScaleType::f16, formats::ScaleType::f32}) {
    auto several = values.values;
    for (size_t c = 0; c < 32; ++c) several[c * panel_rows + 3] = 0;
    for (size_t c = 1; c < 32; ++c) several[c * panel_rows + 5] = 0;
    const auto searched = [&](const std::vector<float>& target, bool alone) {
      return searched_scales({.target = target.data(),
                              .weights = target.data(),
                              .importance = importance.data(),
                              .coupling = coupling.data(),
                              .coupling_stride = 32,
                              .row_alone = alone},
                             levels, type);
    };
    const auto all = searched(several, false);
    for (size_t r = 0; r < panel_rows; ++r) {
      auto alone = several;
      for (size_t i = 0; i < alone.size(); ++i) alone[i] = several[i / panel_rows * panel_rows + r];
      const auto found = searched(alone, true);
      for (size_t lane = 0; lane < panel_rows; ++lane) EXPECT_EQ(found.bits[lane], all.bits[r]) << r;
    }
  }
}

}  // namespace
}  // namespace w4q::quantize
