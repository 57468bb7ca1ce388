// Coordinate descent behind error feedback.
#include "quantize/sweeps.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/parallel.h"
#include "feedback_samples.h"
#include "quantize/block_rounding.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::Scheme;
using formats::SchemeFamily;
using test::Layer;

constexpr double damping = 0.01;

/// e·H·eᵀ of every row, H the Gram matrix with its damping, in fp64.
std::vector<double> objective(const Layer& layer, const formats::PackedWeight& packed) {
  const auto values = test::decode(packed);
  double ridge = 0;
  for (int64_t c = 0; c < layer.k; ++c) ridge += damping * double{layer.gram_view().row(c)[c]} / double(layer.k);
  std::vector<double> result;
  for (int64_t r = 0; r < layer.n; ++r) {
    std::vector<double> errors;
    for (int64_t c = 0; c < layer.k; ++c) {
      const auto at = static_cast<size_t>(r * layer.k + c);
      errors.push_back(double{values[at]} - double{layer.weight.values[at]});
    }
    double sum = 0;
    for (size_t i = 0; i < errors.size(); ++i) {
      const float* row = layer.gram_view().row(static_cast<int64_t>(i));
      for (size_t j = 0; j < errors.size(); ++j) sum += errors[i] * double{row[j]} * errors[j];
      sum += ridge * errors[i] * errors[i];
    }
    result.push_back(sum);
  }
  return result;
}

double total(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

/// All steps of `good` that the scheme takes, without and with sweeps.
QuantizeOptions options_for(const Scheme& scheme, bool sweeps, bool search = true) {
  QuantizeOptions options;
  if (search) options.steps = preset_steps("good", scheme).without(&StepRow::needs_statistics);
  options.steps.add({StepKind::feedback});
  if (sweeps) options.steps.add({StepKind::sweeps});
  options.steps.remove(StepKind::fit_norms);
  return options;
}

/// Of no row does the error rise, and of the whole it falls, whichever scales are tried.
TEST(Sweeps, LessenTheErrorOfEveryScheme) {
  const Layer layer(20, 168);
  for (const Scheme& scheme : test::fed_back_schemes()) {
    for (const bool search : {false, true}) {
      const auto before = layer.fed_back(scheme, options_for(scheme, false, search));
      const auto after = layer.fed_back(scheme, options_for(scheme, true, search));
      EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(after.weight, "w"));
      const auto from = objective(layer, before.weight), to = objective(layer, after.weight);
      for (size_t r = 0; r < from.size(); ++r) {
        // A change is taken for a fall by 1e-4 of its gain, which products in fp32 know to about 1e-6.
        EXPECT_LE(to[r], from[r] * (1 + 1e-6)) << to_string(scheme) << ", row " << r;
      }
      EXPECT_LT(total(to), total(from)) << to_string(scheme) << " " << search;
    }
  }
}

/// Rows that share rings fall together; measured: to .87 … .98 of what feedback leaves.
TEST(Sweeps, LessenTheErrorOfEveryStripOfRings) {
  const Layer layer(140, 168);
  for (const Scheme& scheme : formats::scheme_row(SchemeFamily::trellis).schemes()) {
    const auto before = layer.fed_back(scheme);
    const auto after = layer.fed_back(scheme, options_for(scheme, true, false));
    EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(after.weight, "w"));
    const auto from = objective(layer, before.weight), to = objective(layer, after.weight);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 128}, {128, 140}}) {
      const double was = std::accumulate(from.begin() + begin, from.begin() + end, 0.0);
      const double is = std::accumulate(to.begin() + begin, to.begin() + end, 0.0);
      EXPECT_LT(is, 0.99 * was) << to_string(scheme) << ", rows from " << begin << ": " << is / was;
    }
  }
}

/// bitsandbytes' tables, whose rows are whole blocks here: each step leaves less error than the one before.
TEST(Sweeps, LessenTheErrorOfFlatBlocks) {
  const Layer layer(20, 128);
  for (const char* name : {"lut4-b32-f32", "lut4-b32-nested", "lut4-b64-f32"}) {
    const Scheme scheme = formats::parse_scheme(name);
    for (const bool search : {false, true}) {
      const double plain = total(objective(layer, layer.plain(scheme).weight));
      const auto fed_back = layer.fed_back(scheme, options_for(scheme, false, search));
      const auto swept = layer.fed_back(scheme, options_for(scheme, true, search));
      EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(swept.weight, "w"));
      EXPECT_LT(total(objective(layer, fed_back.weight)), plain) << name << " " << search;
      EXPECT_LT(total(objective(layer, swept.weight)), total(objective(layer, fed_back.weight))) << name;
    }
  }
  const Layer ragged(20, 100);
  QuantizeOptions searched;
  searched.steps = {{StepKind::search_scales}};
  test::expect_error(ErrorCode::unsupported, {"across rows of 100", "64"},
                     [&] { ragged.plain(formats::parse_scheme("nf4"), searched); });
}

/// Shares of the error that feedback leaves; measured .86 … .95.
TEST(Sweeps, LeaveAShareOfTheError) {
  const Layer layer(70, 300);
  for (const char* name : {"kbit2-b32-e4m4", "kbit3-b32-e4m4", "kbit4-b32-f16", "int4-g128-f16-asym", "int3-g32-f16",
                           "int4-row-f32", "rotated3-d128", "rotated2-row"}) {
    const Scheme scheme = formats::parse_scheme(name);
    const double from = total(objective(layer, layer.fed_back(scheme, options_for(scheme, false)).weight));
    const double to = total(objective(layer, layer.fed_back(scheme, options_for(scheme, true)).weight));
    EXPECT_LT(to, 0.97 * from) << name << " " << to / from;
  }
}

TEST(Sweeps, BytesDoNotDependOnThreads) {
  const Layer layer(200, 90);
  for (const char* name : {"kbit3-b32-e4m4", "int4-g32-f16-asym", "int3-row-f16", "rotated3-d32", "trellis3-w8"}) {
    const Scheme scheme = formats::parse_scheme(name);
    set_threads(1);
    const auto one = layer.fed_back(scheme, options_for(scheme, true));
    set_threads(3);
    const auto three = layer.fed_back(scheme, options_for(scheme, true));
    set_threads(0);
    EXPECT_TRUE(bytes_equal(one.weight, three.weight)) << name;
  }
}

/// Rows of three weights, swept until nothing moves: no single change of a code lessens the error, which lies between
/// that of the best of all codes under the same scale (measured 1.00 … 1.014 of it) and that of feedback.
TEST(Sweeps, EndWhereNoSingleChangeHelps) {
  const Layer layer(100, 3);
  for (const char* name : {"kbit3-b32-e4m4", "int3-g32-f16-asym", "int2-row-f32"}) {
    const Scheme scheme = formats::parse_scheme(name);
    const ErrorFactor factor(layer.gram_view(), feedback_block(scheme, layer.k), damping, "w");
    const std::vector<float> alike(3, 1.0f);
    const CalibratedInput input{alike, &factor, layer.gram_view()};
    auto options = options_for(scheme, false);
    options.input = &input;
    auto packed = layer.plain(scheme, options).weight;
    const auto start = objective(layer, packed);
    for (int i = 0; i < 8; ++i) sweep(layer.view(), options, packed);
    const auto end = objective(layer, packed);
    std::vector<double> single = end, best = end;
    const int codes = 1 << scheme.bits;
    const auto rounding = block_rounding(packed, options);
    std::vector<uint8_t> reached(300);
    BlockScale scale;
    for (int64_t r = 0; r < layer.n; ++r) {
      rounding->read(r, std::span(reached).subspan(static_cast<size_t>(3 * r), 3), {&scale, 1});
    }
    for (int choice = 0; choice < codes * codes * codes; ++choice) {
      const std::vector<uint8_t> tried = {static_cast<uint8_t>(choice % codes),
                                          static_cast<uint8_t>(choice / codes % codes),
                                          static_cast<uint8_t>(choice / codes / codes)};
      std::vector<int> changes(static_cast<size_t>(layer.n));
      for (size_t i = 0; i < reached.size(); ++i) changes[i / 3] += reached[i] != tried[i % 3] ? 1 : 0;
      for (int64_t r = 0; r < layer.n; ++r) rounding->write_codes(r, tried);
      const auto found = objective(layer, packed);
      for (size_t r = 0; r < found.size(); ++r) {
        best[r] = std::min(best[r], found[r]);
        if (changes[r] == 1) single[r] = std::min(single[r], found[r]);
      }
    }
    for (size_t r = 0; r < end.size(); ++r) {
      EXPECT_LE(end[r], single[r] * (1 + 1e-3)) << name << ", row " << r;  // changes worth 1e-4 of a gain are left
      EXPECT_LE(end[r], start[r] * (1 + 1e-6)) << name << ", row " << r;
    }
    EXPECT_LT(total(end), 1.05 * total(best))
        << name << " " << total(end) / total(best) << " " << total(start) / total(best);
  }
}

/// Of a row that is one block nothing else is kept: whatever it starts from, it ends where feedback brings it, or lower.
TEST(Sweeps, BringABlockAloneWhereFeedbackDoes) {
  for (const auto& [name, k] : {std::pair{"kbit3-b32-e4m4", 32},
                                {"int4-g128-f16-asym", 128},
                                {"rotated3-d64", 64},
                                {"nvfp4", 16},
                                {"mxfp4", 32}}) {
    const Layer layer(100, k);
    const Scheme scheme = formats::parse_scheme(name);
    QuantizeOptions options;
    if (scheme.family != SchemeFamily::integer) options.steps = {{StepKind::search_scales}};
    const double fed_back = total(objective(layer, layer.fed_back(scheme, options).weight));
    auto packed = layer.plain(scheme, options).weight;
    EXPECT_GT(total(objective(layer, packed)), 1.5 * fed_back) << name;
    const ErrorFactor factor(layer.gram_view(), feedback_block(scheme, k), damping, "w");
    const std::vector<float> alike(static_cast<size_t>(k), 1.0f);
    const CalibratedInput input{alike, &factor, layer.gram_view()};
    options.input = &input;
    sweep(layer.view(), options, packed);
    EXPECT_LT(total(objective(layer, packed)), fed_back) << name;
  }
}

TEST(Sweeps, NeedTheGramMatrix) {
  const Layer layer(4, 64);
  const ErrorFactor factor(layer.gram_view(), 32, damping, "w");
  const CalibratedInput input{{}, &factor};
  QuantizeOptions options;
  options.input = &input;
  options.steps = parse_steps("feedback → sweeps");
  test::expect_error(ErrorCode::bad_argument, {"w", "Gram", "64 × 64", "0 × 0"},
                     [&] { layer.plain(formats::parse_scheme("int4-g32-f16"), options); });
}

/// Channels that never spoke, and inputs that depend on one another.
TEST(Sweeps, TakeWhatFeedbackTakes) {
  const Scheme scheme = formats::parse_scheme("kbit3-b32-e4m4");
  const Layer few(20, 64, 8);
  const auto swept = few.fed_back(scheme, options_for(scheme, true), 0.0);
  EXPECT_LE(few.error(swept), few.error(few.fed_back(scheme, options_for(scheme, false), 0.0)));
  Layer silent(20, 64);
  std::ranges::fill(silent.gram, 0.0f);
  EXPECT_NO_THROW(silent.fed_back(scheme, options_for(scheme, true)));
}

}  // namespace
}  // namespace w4q::quantize
