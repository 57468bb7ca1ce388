// Blocks of GGUF with searched scales, with and without what calibration knows.
#include "quantize/gguf.h"
#include "quantize/gguf_lattice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "each_target.h"
#include "feedback_samples.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_lattice.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::GgufForm;
using test::expect_error;

constexpr int64_t rows = 37, width = 512;  // ragged panels, two blocks of 256

std::vector<float> decoded_blocks(const GgufForm& form, const Buffer& blocks, size_t count) {
  std::vector<float> values(count);
  formats::gguf_decode(form.type, blocks.bytes(), values);
  return values;
}

TensorView view_of(const std::vector<float>& values, int64_t n, int64_t k) {
  return {"w", DType::f32, {n, k}, bytes_of(values)};
}

/// Squared error over squared weights, columns weighed.
double weighted_error(const std::vector<float>& a, const std::vector<float>& b, std::span<const float> importance) {
  double error = 0, power = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double weight = importance.empty() ? 1 : importance[i % importance.size()];
    const double miss = double{a[i]} - double{b[i]};
    error += weight * miss * miss;
    power += weight * double{a[i]} * double{a[i]};
  }
  return error / power;
}

/// Of normal weights, measured on 2026-11-23, a twentieth wider; a smaller error would be a gain.
TEST(GgufSearch, ErrsAsLittleAsMeasured) {
  const struct {
    GgmlType type;
    double relative;
  } measured[] = {{GgmlType::q4_0, 0.085},   {GgmlType::q4_1, 0.073},  {GgmlType::q5_0, 0.0426},
                  {GgmlType::q5_1, 0.0357},  {GgmlType::q8_0, 0.0054}, {GgmlType::iq4_nl, 0.0775},
                  {GgmlType::mxfp4, 0.118},  {GgmlType::q2_k, 0.273},  {GgmlType::q3_k, 0.151},
                  {GgmlType::q4_k, 0.0736},  {GgmlType::q5_k, 0.0366}, {GgmlType::q6_k, 0.0181},
                  {GgmlType::iq4_xs, 0.0779}};
  ASSERT_EQ(std::size(measured), formats::gguf_forms().size());
  const test::RandomMatrix weight(rows, width, 1);
  for (const auto& row : measured) {
    const GgufForm& form = *formats::find_gguf_form(row.type);
    const auto blocks = gguf_blocks(view_of(weight.values, rows, width), form, nullptr);
    const auto values = decoded_blocks(form, blocks, weight.values.size());
    EXPECT_LT(std::sqrt(weighted_error(weight.values, values, {})), row.relative) << ggml_type_name(row.type);
  }
}

/// Blocks whose values the type can hold come back: levels, scales and minimums all land where the decoder looks.
TEST(GgufSearch, FindsWhatFitsExactly) {
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    formats::GgufScales scales{.d = 0.125f, .d_minimum = form.has_offset() ? 0.25f : 0.0f};
    std::vector<uint8_t> levels(static_cast<size_t>(form.block));
    for (size_t i = 0; i < levels.size(); ++i)
      levels[i] = static_cast<uint8_t>((7 * i + i / 32) % static_cast<size_t>(form.levels()));
    for (size_t j = 0; j < static_cast<size_t>(form.parts()); ++j) {
      scales.scales[j] = static_cast<int16_t>(form.nests() ? form.highest_scale - static_cast<int>(j) / 4 : 1);
      scales.minimums[j] =
          static_cast<uint8_t>(form.highest_minimum > 0 ? form.highest_minimum - static_cast<int>(j) / 4 : 1);
    }
    std::vector<std::byte> block(static_cast<size_t>(describe(form.type).block_bytes));
    store_gguf_block(form, scales, levels, block);
    std::vector<float> values(levels.size());
    formats::gguf_decode(form.type, block, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t part = i / static_cast<size_t>(form.part);
      const float step = scales.d * static_cast<float>(scales.scales[part]);
      const float offset = form.has_offset() ? scales.d_minimum * static_cast<float>(scales.minimums[part]) : 0.0f;
      ASSERT_EQ(values[i], step * form.level(levels[i]) - offset) << i;
    }
    const auto again = gguf_blocks(view_of(values, 1, form.block), form, nullptr);
    // Other scales may say nearly the same; of the 64 levels of Q6_K a third of what normal weights cost is left.
    EXPECT_LT(weighted_error(values, decoded_blocks(form, again, values.size()), {}),
              form.levels() == 64 ? 1.2e-4 : 1e-5);
  }
}

/// Normal weights, or such in bf16 whose parts of 16 differ up to 32-fold.
std::vector<float> weights_of_parts(int64_t n, int64_t k, bool differ) {
  test::RandomMatrix weight(n, k, 3);
  if (!differ) return weight.values;
  for (size_t i = 0; i < weight.values.size(); ++i) {
    const float factor = std::exp2(-5.0f * static_cast<float>(random_uniform(17, i / 16)));
    weight.values[i] = f32_from_bf16(bf16_from_f32(weight.values[i] * factor));
  }
  return weight.values;
}

class GgufBlocksBack : public testing::TestWithParam<bool> {};

/// What a file decodes to is written as the same values, and from then on as the same bytes. Its own bytes come back, of
/// Q2_K but where a block says the same in several ways (measured: 1024 and 1023 of 1024).
TEST_P(GgufBlocksBack, AreWrittenAsTheyWere) {
  const struct {
    GgmlType type;
    size_t equal;
  } measured[] = {{GgmlType::q2_k, 1020}, {GgmlType::q3_k, 1024}, {GgmlType::q4_k, 1024},
                  {GgmlType::q5_k, 1024}, {GgmlType::q6_k, 1024}, {GgmlType::iq4_xs, 1024}};
  constexpr int64_t n = 64, k = 4096;
  const std::vector<float> weight = weights_of_parts(n, k, GetParam());
  for (const auto& [type, least] : measured) {
    SCOPED_TRACE(ggml_type_name(type));
    const GgufForm& form = *formats::find_gguf_form(type);
    const auto size = static_cast<size_t>(describe(type).block_bytes);
    const auto first = gguf_blocks(view_of(weight, n, k), form, nullptr);
    const auto values = decoded_blocks(form, first, weight.size());
    const auto second = gguf_blocks(view_of(values, n, k), form, nullptr);
    const auto again = decoded_blocks(form, second, values.size());
    EXPECT_EQ(std::memcmp(again.data(), values.data(), values.size() * sizeof(float)), 0);
    EXPECT_TRUE(same_bytes(gguf_blocks(view_of(again, n, k), form, nullptr).bytes(), second.bytes()));
    size_t equal = 0;
    for (size_t at = 0; at < first.size(); at += size) {
      equal += std::memcmp(first.data() + at, second.data() + at, size) == 0 ? 1 : 0;
    }
    EXPECT_GE(equal, least);
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, GgufBlocksBack, testing::Bool(),
                         [](const auto& param) { return param.param ? "parts_differ" : "normal"; });

/// Points of lattices: of normal weights so much error is left (measured on 2026-11-27, a twentieth wider), importance
/// moves it, and what was written comes back with the same bytes: in 64 of 64 blocks of each type.
TEST(GgufLattice, ErrsAsLittleAsMeasuredAndComesBack) {
  const struct {
    GgmlType type;
    double relative;
  } measured[] = {{GgmlType::iq3_s, 0.134},
                  {GgmlType::iq3_xxs, 0.185},
                  {GgmlType::iq2_s, 0.252},
                  {GgmlType::iq2_xs, 0.300},
                  {GgmlType::iq2_xxs, 0.343}};
  ASSERT_EQ(std::size(measured), formats::gguf_lattices().size());
  constexpr int64_t n = 32, k = 512;
  const test::RandomMatrix weight(n, k, 3);
  std::vector<float> squares(k);
  for (size_t c = 0; c < k; ++c) squares[c] = c % 3 == 0 ? 4.0f : 0.5f;
  const CalibratedInput input{.mean_squares = squares};
  for (const auto& [type, relative] : measured) {
    SCOPED_TRACE(ggml_type_name(type));
    const GgufForm& form = *formats::find_gguf_form(type);
    const auto plain = gguf_blocks(view_of(weight.values, n, k), form, nullptr);
    const auto values = decoded_blocks(form, plain, weight.values.size());
    EXPECT_LT(std::sqrt(weighted_error(weight.values, values, {})), relative);
    const auto weighed = gguf_blocks(view_of(weight.values, n, k), form, &input);
    EXPECT_LT(weighted_error(weight.values, decoded_blocks(form, weighed, values.size()), squares),
              weighted_error(weight.values, values, squares));
    EXPECT_TRUE(same_bytes(gguf_blocks(view_of(values, n, k), form, nullptr).bytes(), plain.bytes()));
  }
}

/// The search decodes as a reader does, zeros and signs of any parity included.
TEST(GgufLattice, BlocksSayWhatTheSearchTookThemFor) {
  for (const auto& lattice : formats::gguf_lattices()) {
    SCOPED_TRACE(ggml_type_name(lattice.type));
    LatticeSearch search(lattice);
    const test::RandomMatrix weight(1, formats::lattice_block, 5);
    std::vector<float> values = weight.values, read(values.size()), own(values.size());
    const std::vector<float> importance(values.size(), 1.0f);
    for (const bool zero : {false, true}) {
      if (zero) std::ranges::fill(values, 0.0f);
      std::vector<std::byte> bytes(static_cast<size_t>(describe(lattice.type).block_bytes));
      formats::store_lattice_block(lattice, search.run(values.data(), importance.data()), bytes);
      search.decode(own.data());
      formats::gguf_decode(lattice.type, bytes, read);
      EXPECT_EQ(read, own);
    }
  }
}

/// Parts of one sign have offsets that no value under zero tells.
TEST(GgufSearch, DecodedBlocksOfOneSignAreExact) {
  std::vector<float> weights(static_cast<size_t>(rows * width));
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(0.02 + 0.004 * random_normal(21, i));
  for (const GgmlType type : {GgmlType::q4_k, GgmlType::q5_k}) {
    SCOPED_TRACE(ggml_type_name(type));
    const GgufForm& form = *formats::find_gguf_form(type);
    const auto values = decoded_blocks(form, gguf_blocks(view_of(weights, rows, width), form, nullptr), weights.size());
    EXPECT_EQ(decoded_blocks(form, gguf_blocks(view_of(values, rows, width), form, nullptr), values.size()), values);
  }
}

/// A part of even levels down to the lowest under a negative step: half as many under twice the step, a positive one,
/// would be levels, too, but the scale would be none.
TEST(GgufSearch, EvenLevelsKeepAScaleInRange) {
  const GgufForm& form = *formats::find_gguf_form(GgmlType::q6_k);
  std::vector<float> values(256);
  for (size_t i = 0; i < values.size(); ++i) {
    const int level = static_cast<int>(random_bits(22, i) % 64) - 32, even = 2 * (static_cast<int>(i % 16) - 12) - 8;
    const bool doubled = i / 16 == 7;
    values[i] =
        std::ldexp(static_cast<float>(doubled ? -67 * std::max(even, -32) : (i / 16 == 15 ? 128 : 61) * level), -14);
  }
  EXPECT_EQ(decoded_blocks(form, gguf_blocks(view_of(values, 1, 256), form, nullptr), 256), values);
}

/// With importance and feedback too: what has no error has none to feed back.
TEST(GgufSearch, DecodedBlocksAreExactUnderCalibration) {
  const test::Layer layer(rows, width);
  std::vector<float> squares;
  for (int64_t c = 0; c < width; ++c) squares.push_back(layer.gram_view().row(c)[c]);
  for (const GgufForm& form : formats::gguf_forms()) {
    if (!form.nests()) continue;
    SCOPED_TRACE(ggml_type_name(form.type));
    const size_t count = static_cast<size_t>(rows * width);
    const auto values = decoded_blocks(form, gguf_blocks(layer.view(), form, nullptr), count);
    const ErrorFactor factor(layer.gram_view(), form.block, 0.01, "w");
    const CalibratedInput weighed{.mean_squares = squares}, fed{.mean_squares = {}, .feedback = &factor};
    for (const CalibratedInput* input : {&weighed, &fed}) {
      EXPECT_EQ(decoded_blocks(form, gguf_blocks(view_of(values, rows, width), form, input), count), values);
    }
  }
}

TEST(GgufSearch, ImportanceLowersWhatItWeighs) {
  const test::Layer layer(rows, width);
  std::vector<float> squares;
  for (int64_t c = 0; c < width; ++c) squares.push_back(layer.gram_view().row(c)[c]);
  const CalibratedInput input{.mean_squares = squares};
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    const auto error = [&](const CalibratedInput* known) {
      const auto blocks = gguf_blocks(layer.view(), form, known);
      return weighted_error(layer.weight.values, decoded_blocks(form, blocks, layer.weight.values.size()), squares);
    };
    // Powers of two leave nothing to choose in most blocks.
    EXPECT_LT(error(&input), error(nullptr) * (form.type == GgmlType::mxfp4 ? 1.0 : 0.99));
  }
}

TEST(GgufSearch, FeedbackLowersTheErrorOfOutputs) {
  const test::Layer layer(rows, width);
  std::vector<float> squares;
  for (int64_t c = 0; c < width; ++c) squares.push_back(layer.gram_view().row(c)[c]);
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    const ErrorFactor factor(layer.gram_view(), form.block, 0.01, "w");
    const auto error = [&](const CalibratedInput& known) {
      auto difference = decoded_blocks(form, gguf_blocks(layer.view(), form, &known), layer.weight.values.size());
      for (size_t i = 0; i < difference.size(); ++i) difference[i] -= layer.weight.values[i];
      return output_error({difference.data(), rows, width}, layer.gram_view());
    };
    // 0.45 to 0.6 on this layer (2026-11-23).
    EXPECT_LT(error({.mean_squares = squares, .feedback = &factor}), 0.8 * error({.mean_squares = squares}));
  }
}

TEST(GgufSearch, TheBytesDoNotDependOnThreadsOrOnNeighbours) {
  const test::Layer layer(rows, width);
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    const ErrorFactor factor(layer.gram_view(), form.block, 0.01, "w");
    const CalibratedInput fed{.mean_squares = {}, .feedback = &factor};
    for (const CalibratedInput* input : {static_cast<const CalibratedInput*>(nullptr), &fed}) {
      set_threads(1);
      const auto one = gguf_blocks(layer.view(), form, input);
      set_threads(3);
      const auto three = gguf_blocks(layer.view(), form, input);
      set_threads(0);
      EXPECT_TRUE(std::ranges::equal(one.bytes(), three.bytes()));
      const TensorView last{"w", DType::f32, {1, width}, layer.view().bytes.last(width * sizeof(float))};
      const auto alone = gguf_blocks(last, form, input);
      EXPECT_TRUE(std::ranges::equal(alone.bytes(), one.bytes().last(alone.size())));
    }
  }
}

TEST(GgufSearch, EveryInstructionSetGivesTheSameBytes) {
  const test::Layer layer(rows, width);
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    const auto wanted = gguf_blocks(layer.view(), form, nullptr);
    test::for_each_target(
        [&] { EXPECT_TRUE(std::ranges::equal(gguf_blocks(layer.view(), form, nullptr).bytes(), wanted.bytes())); });
  }
}

TEST(GgufSearch, ZerosTinyAndHugeValuesStayFinite) {
  for (const GgufForm& form : formats::gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    for (const float value : {0.0f, -0.0f, 1e-45f, -1e-39f, 1e-30f, 1e-8f, form.largest, -form.largest}) {
      std::vector<float> values(static_cast<size_t>(form.block), 0.0f);
      values[3] = value;
      const auto back = decoded_blocks(form, gguf_blocks(view_of(values, 1, form.block), form, nullptr), values.size());
      for (const float each : back) ASSERT_TRUE(std::isfinite(each)) << value;
      if (std::abs(value) > 1) {
        EXPECT_NEAR(back[3] / value, 1, 0.26) << value;  // E2M1 has 4 and 6 and nothing between
      }
    }
  }
}

TEST(GgufSearch, RefusesWhatNoBlockCanHold) {
  const GgufForm& form = *formats::find_gguf_form(GgmlType::q4_k);
  std::vector<float> values(2 * 256, 0.5f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    values[256 + 7] = bad;
    expect_error(ErrorCode::bad_file, {"w", "row 1", "column 7"},
                 [&] { gguf_blocks(view_of(values, 2, 256), form, nullptr); });
  }
  values[256 + 7] = 2 * form.largest;
  expect_error(ErrorCode::unsupported, {"w", "row 1, column 7", "wider range"},
               [&] { gguf_blocks(view_of(values, 2, 256), form, nullptr); });
  expect_error(ErrorCode::internal, {"whole blocks"}, [&] { gguf_blocks(view_of(values, 4, 128), form, nullptr); });
}

}  // namespace
}  // namespace w4q::quantize
