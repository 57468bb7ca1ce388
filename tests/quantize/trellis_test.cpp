// The quantizer of the trellis family: vectors and the definition, feedback, scales of rows.
#include "quantize/trellis.h"

#include <gtest/gtest.h>

#include <csignal>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "each_target.h"
#include "feedback_samples.h"
#include "formats/trellis.h"
#include "quantize/norm_calibration.h"
#include "quantize/trellis_simd.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::Scheme;
using formats::trellis_rows;
using test::Layer;

/// Columns that are whole and cut off, with rows that do not count, and one far out.
std::vector<formats::TrellisColumn> columns() {
  std::vector<formats::TrellisColumn> result;
  for (const int rows : {trellis_rows, trellis_rows - 1, trellis_rows - 3, 70, 2}) {
    formats::TrellisColumn column{.rows = rows};
    for (size_t p = 0; p < static_cast<size_t>(rows); ++p) {
      column.targets[p] = 148 * test::draw_normal(static_cast<uint64_t>(rows), p);
      column.counts[p] = p % 13 != 5;
    }
    column.targets[0] = 1e9f;
    result.push_back(column);
    column.weighed = true;
    for (size_t p = 0; p < static_cast<size_t>(rows); ++p) column.importance[p] = static_cast<float>(p * 7 % 11);
    result.push_back(column);
  }
  return result;
}

TEST(TrellisSearch, VectorsFindWhatTheDefinitionFinds) {
  for (int bits = formats::trellis_min_bits; bits <= formats::trellis_max_bits; ++bits) {
    for (const int window : {8, 9, 12, 16}) {
      const auto levels = formats::trellis_levels(window);
      formats::TrellisSearch plain(bits, window, formats::trellis_plain_step, levels);
      std::vector<formats::TrellisSymbols> expected;
      for (const auto& column : columns()) expected.push_back(plain(column));
      test::for_each_target([&] {
        const auto ordered = trellis_fast_levels(bits, window);
        formats::TrellisSearch fast(bits, window, trellis_fast_step, ordered);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(fast(columns()[i]), expected[i]) << bits << " bits, window " << window << ", column " << i;
        }
      });
    }
  }
}

Scheme trellis(std::string_view name) { return formats::parse_scheme(name); }

TEST(TrellisQuantizer, RefusesWhatMeansNothingToIt) {
  const Layer layer(3, 40);
  const auto refuse = [&](std::string_view what, const QuantizeOptions& options) {
    test::expect_error(ErrorCode::bad_argument, {"trellis", what}, [&] { layer.plain(trellis("trellis3"), options); });
  };
  QuantizeOptions options;
  options.codebook = "nf";
  refuse("codebook", options);
  options = {};
  options.bnb_compatible = true;
  refuse("bitsandbytes", options);
  options = {};
  options.steps = {{StepKind::clip}};
  refuse("range to clip", options);
  options.steps = {{StepKind::search_scales}};
  refuse("searched scales", options);
  for (const StepKind kind : {StepKind::sweeps, StepKind::feedback_outputs}) {
    EXPECT_TRUE(step_row(kind).accepts(trellis("trellis2-w8"), nullptr));
    EXPECT_FALSE(step_row(kind).accepts(trellis("exl3-3"), nullptr));
  }
}

TEST(TrellisQuantizer, NamesAWeightThatIsNotFinite) {
  Layer layer(140, 64);
  layer.weight.values[64 * 133 + 7] = INFINITY;
  const Scheme scheme = trellis("trellis2-w8");
  test::expect_error(ErrorCode::bad_file, {"w", "133", "7"}, [&] { layer.plain(scheme); });
  test::expect_error(ErrorCode::bad_file, {"w", "133", "7"}, [&] { layer.fed_back(scheme); });
}

/// A matrix takes minutes: whoever ends the work does not wait for its last row.
TEST(TrellisQuantizer, ASignalEndsItWithinAMatrix) {
  Layer layer(128, 128);
  note_interrupt(SIGINT);
  for (const char* name : {"trellis2-w8", "exl3-3", "kbit3-b32-e4m4"}) {
    const Scheme scheme = formats::parse_scheme(name);
    QuantizeOptions options;
    if (scheme.family == formats::SchemeFamily::kbit) options.steps.add({StepKind::search_scales});
    EXPECT_THROW(layer.plain(scheme, options), Interrupted) << name;
  }
  EXPECT_THROW(layer.fed_back(formats::parse_scheme("kbit3-b32-e4m4")), Interrupted);
  forget_interrupt();
}

TEST(TrellisFeedback, WithoutCorrelationIsRounding) {
  Layer layer(140, 70);
  for (int64_t i = 0; i < layer.k; ++i) {
    for (int64_t j = 0; j < layer.k; ++j) layer.gram[static_cast<size_t>(i * layer.k + j)] = i == j ? 1.0f : 0.0f;
  }
  for (const char* name : {"trellis2-w8", "trellis3-w10", "trellis4-w12"}) {
    EXPECT_TRUE(bytes_equal(layer.fed_back(trellis(name)).weight, layer.plain(trellis(name)).weight)) << name;
  }
}

/// Shares of the error of rounding each weight by itself; measured 0.30, 0.28 and 0.28.
TEST(TrellisFeedback, LessensTheErrorOfTheOutputs) {
  const Layer layer(256, 300);
  for (const char* name : {"trellis2-w10", "trellis3-w10", "trellis4-w10"}) {
    const auto result = layer.fed_back(trellis(name));
    EXPECT_NO_THROW(formats::scheme_row(formats::SchemeFamily::trellis).validate(result.weight, "w"));
    EXPECT_LT(layer.error(result), 0.33 * layer.error(layer.plain(trellis(name)))) << name;
  }
}

/// A column that is rounded is known to all that come behind it, in the same block too: what is left of a target is no
/// more than what rounding it takes.
TEST(TrellisFeedback, IsExactToTheColumn) {
  const Layer layer(128, 50);
  const Scheme scheme = trellis("trellis4-w12");
  const auto decoded = test::decode(layer.fed_back(scheme).weight);
  const ErrorFactor factor(layer.gram_view(), feedback_block(scheme, layer.k), 0.01, "w");
  double moved = 0, left = 0;
  for (int64_t r = 0; r < layer.n; ++r) {
    const auto at = [&](int64_t position) {
      return static_cast<size_t>(r * layer.k + factor.order()[static_cast<size_t>(position)]);
    };
    for (int64_t p = 0; p < layer.k; ++p) {
      double target = layer.weight.values[at(p)];
      for (int64_t e = 0; e < p; ++e) {
        target += double{factor.coupling().row(p)[e]} * (double{layer.weight.values[at(e)]} - double{decoded[at(e)]});
      }
      moved += target * target;
      left += (target - double{decoded[at(p)]}) * (target - double{decoded[at(p)]});
    }
  }
  // 22.99 dB of normal weights (docs/trellis.md); moved targets are larger than the weights that scales were made for.
  EXPECT_GT(10 * std::log10(moved / left), 22);
}

TEST(TrellisFeedback, BytesDoNotDependOnThreads) {
  const Layer layer(300, 90);
  const Scheme scheme = trellis("trellis3-w9");
  set_threads(1);
  const auto plain = layer.plain(scheme), one = layer.fed_back(scheme);
  set_threads(3);
  EXPECT_TRUE(bytes_equal(layer.plain(scheme).weight, plain.weight));
  EXPECT_TRUE(bytes_equal(layer.fed_back(scheme).weight, one.weight));
  set_threads(0);
}

TEST(TrellisScales, LeastSquaresLessenTheErrorOfTheOutputs) {
  const Layer layer(140, 300);
  for (const char* name : {"trellis2-w8", "trellis3-w10"}) {
    auto result = layer.fed_back(trellis(name));
    const auto before = result.weight.clone();
    const double error = layer.error(result);
    EXPECT_GT(calibrate_norms(result.weight, {layer.weight.values.data(), layer.n, layer.k}, layer.gram_view(), 0), 70);
    EXPECT_LT(layer.error(result), error) << name;
    EXPECT_TRUE(same_bytes(result.weight.plane(formats::PlaneRole::codes).bytes.bytes(),
                           before.plane(formats::PlaneRole::codes).bytes.bytes()));
    EXPECT_NO_THROW(formats::scheme_row(formats::SchemeFamily::trellis).validate(result.weight, "w"));
  }
}

}  // namespace
}  // namespace w4q::quantize
