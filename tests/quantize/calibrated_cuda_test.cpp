// Calibration's passes on the GPU beside those of the CPU: equal bytes where the definition fixes the order of sums,
// equal choices elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "core/convert.h"
#include "core/text.h"
#include "device/properties.h"
#include "feedback_samples.h"
#include "gpu.h"
#include "kbit_samples.h"
#include "kernels/random_matrix.h"
#include "quantize/awq.h"
#include "quantize/feedback.h"
#include "quantize/group_cuda.h"
#include "quantize/rounding.h"
#include "quantize/statistics_cuda.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::parse_scheme;
using formats::Scheme;
using test::RandomMatrix;

/// Weights, and inputs in which neighbours are alike and some channels loud; values of f16.
struct Layer {
  Layer(int64_t n_, int64_t k_, int64_t rows = 1200)
      : n(n_), k(k_), weight(n, k, 1), inputs(rows, k, 3), statistics(make_statistics(k, true)) {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = inputs.view().row(r);
      for (int64_t c = 1; c < k; ++c) row[c] = 0.8f * row[c - 1] + 0.6f * row[c];
      for (int64_t c = 5; c < k; c += 23) row[c] *= 8;
    }
    halves = Buffer(inputs.values.size() * 2);
    narrow(inputs.values, DType::f16, halves.bytes());
    widen(halves.bytes(), DType::f16, inputs.values);
    quantize::add_rows(statistics, inputs, "x");
    gram = supported_gram(statistics);
    mean_abs = statistics.mean_abs();
  }
  MatrixView<const float> gram_view() const { return {gram.data(), k, k}; }
  TensorView view() const { return {"w", DType::f32, {n, k}, bytes_of(weight.values)}; }
  double error(const formats::PackedWeight& packed) const {
    auto difference = test::decode(packed);
    for (size_t i = 0; i < difference.size(); ++i) difference[i] = weight.values[i] - difference[i];
    return output_error({difference.data(), n, k}, gram_view());
  }

  int64_t n, k;
  RandomMatrix weight, inputs;
  Buffer halves;
  InputStatistics statistics;
  std::vector<float> gram, mean_abs;
};

class CalibratedCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    work = std::make_unique<CudaWork>(test::gpu());
  }
  std::shared_ptr<GramCuda> gram(const Layer& layer) { return std::make_shared<GramCuda>(*work, layer.statistics); }

  std::unique_ptr<CudaWork> work;
};

/// What the CPU makes of a weight as a calibrated layer does.
QuantizeResult on_cpu(const Layer& layer, const Scheme& scheme, QuantizeOptions options, bool feedback) {
  std::vector<float> squares;
  for (int64_t c = 0; c < layer.k; ++c) squares.push_back(layer.gram_view().row(c)[c]);
  CalibratedInput input{squares};
  std::optional<ErrorFactor> factor;
  if (feedback) {
    factor.emplace(layer.gram_view(), feedback_block(scheme, layer.k), 0.01, "w");
    input.feedback = &*factor;
  }
  options.input = &input;
  return rounding_quantizer(scheme).run(layer.view(), scheme, options);
}

QuantizeOptions options_for(const Scheme& scheme, bool search) {
  QuantizeOptions options;
  if (search) options.steps = parse_steps(scheme.family == formats::SchemeFamily::integer ? "clip" : "lloyd+search");
  return options;
}

TEST_F(CalibratedCuda, TheGramMatrixIsTheCpus) {
  const Layer layer(3, 150);
  const auto matrix = gram(layer);
  EXPECT_EQ(matrix->download(), layer.gram);
  auto divided = layer.gram;
  std::vector<float> scales;
  for (int64_t c = 0; c < layer.k; ++c) scales.push_back(0.5f + static_cast<float>(c) / 100);
  for (size_t r = 0; r < scales.size(); ++r) {
    for (size_t c = 0; c < scales.size(); ++c)
      divided[r * scales.size() + c] = layer.gram[r * scales.size() + c] / scales[r] / scales[c];
  }
  matrix->divide(scales);
  EXPECT_EQ(matrix->download(), divided);
}

TEST_F(CalibratedCuda, RotationsAreTheCpusBitForBit) {
  for (const int64_t k : {32, 150, 700}) {
    const formats::InputRotation rotation({128, 42}, k);
    const RotationCuda on_gpu(*work, rotation);
    const Layer layer(20, k);
    const auto turn_rows = [&](std::vector<float>& rows) {
      for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(k)) {
        rotation.rotate(std::span(rows).subspan(at, static_cast<size_t>(k)));
      }
    };
    std::vector<float> rows = layer.weight.values;
    auto weight = device::DeviceBuffer::copy_of(bytes_of(rows), work->stream);
    turn_rows(rows);
    on_gpu.rotate(*work, weight.as<float>(), layer.n);
    EXPECT_EQ(work->fetch(weight.as<float>(), layer.n * k), rows) << k;
    for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(k)) {
      rotation.restore(std::span(rows).subspan(at, static_cast<size_t>(k)));
    }
    on_gpu.restore(*work, weight.as<float>(), layer.n);
    EXPECT_EQ(work->fetch(weight.as<float>(), layer.n * k), rows) << k;

    std::vector<float> gram_on_cpu = layer.gram;
    const auto entry = [&](int64_t i, int64_t j) -> float& { return gram_on_cpu[static_cast<size_t>(i * k + j)]; };
    turn_rows(gram_on_cpu);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < i; ++j) std::swap(entry(i, j), entry(j, i));
    }
    turn_rows(gram_on_cpu);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < i; ++j) entry(i, j) = entry(j, i) = (entry(i, j) + entry(j, i)) / 2;
    }
    const auto matrix = gram(layer);
    matrix->rotate(on_gpu);
    EXPECT_EQ(matrix->download(), gram_on_cpu) << k;
  }
}

TEST_F(CalibratedCuda, StatisticsAgree) {
  const Layer layer(1, 700, 5000);
  StatisticsCuda sums(*work, layer.k, true);
  const auto rows = device::DeviceBuffer::copy_of(layer.halves.bytes(), work->stream);
  sums.add_rows(rows.as<__half>(), 4999);
  sums.add_rows(rows.as<__half>() + 4999 * layer.k, 1);
  const auto found = sums.download("x");
  EXPECT_EQ(found.count, layer.statistics.count);
  const auto means = work->fetch(sums.mean_triangle("x"), triangle_size(layer.k));
  ASSERT_EQ(means.size(), found.gram.size());
  for (size_t i = 0; i < means.size(); ++i) {
    ASSERT_EQ(means[i],
              static_cast<float>(static_cast<float>(found.gram[i]) * (1.0 / static_cast<double>(found.count))));
  }
  EXPECT_EQ(GramCuda(*work, means, layer.k).download(), expand_triangle(means, layer.k));
  for (int64_t i = 0; i < layer.k; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_NEAR(found.sum_abs[at], layer.statistics.sum_abs[at], 1e-9 * layer.statistics.sum_abs[at]);
    EXPECT_NEAR(found.sum_squares[at], layer.statistics.sum_squares[at], 1e-9 * layer.statistics.sum_squares[at]);
    for (int64_t j = i; j < layer.k; ++j) {
      const auto entry = static_cast<size_t>(triangle_row(layer.k, i) + j - i);
      // γ of the 4096 products of one sum in fp32, against Σ|x||y| ≤ √(Σx²·Σy²); tensor cores cut some bits off.
      const double bound =
          2 * test::gamma(4096) *
          std::sqrt(layer.statistics.sum_squares[at] * layer.statistics.sum_squares[static_cast<size_t>(j)]);
      ASSERT_NEAR(found.gram[entry], layer.statistics.gram[entry], bound);
    }
  }
}

TEST_F(CalibratedCuda, SearchesChooseWhatTheCpuChooses) {
  for (const char* name :
       {"int4-g128-f16-asym", "int3-g32-f16", "int4-row-f16-asym", "kbit3-b32-e4m4", "kbit4-b32-f16"}) {
    const Scheme scheme = parse_scheme(name);
    const Layer layer(200, 300);
    const Rounding rounding = rounding_of(scheme, layer.k, {});
    const std::vector<AwqLinear> linears = {{layer.weight, rounding}};
    ChannelMagnitudes magnitudes(layer.k);
    magnitudes.add(layer.view(), rounding.block);
    const auto sizes = magnitudes.mean();
    for (const bool before_feedback : {false, true}) {
      std::optional<AwqFeedback> feedback;
      if (before_feedback) feedback = {rounding.block, 0.01, "w"};
      const auto cpu = search_scales(linears, {layer.mean_abs, layer.gram_view(), {}, sizes, feedback});
      GroupCuda group(*work, gram(layer));
      const auto measured = group.add(layer.view(), scheme, {});
      EXPECT_NEAR(measured.plain, cpu.plain_error, 1e-4 * cpu.plain_error) << name;
      EXPECT_NEAR(measured.power, output_error(layer.weight, layer.gram_view()), 1e-4 * measured.power) << name;
      const auto found = group.search({layer.mean_abs, {}, {}, sizes, feedback}, measured.plain);
      EXPECT_EQ(found.point.alpha, cpu.point.alpha) << name;
      EXPECT_EQ(found.point.by_weights, cpu.point.by_weights) << name;
      EXPECT_EQ(found.scales, cpu.scales) << name;
      EXPECT_NEAR(found.error, cpu.error, 1e-4 * cpu.error) << name;
      EXPECT_NEAR(found.plain_error, cpu.plain_error, 1e-4 * cpu.plain_error) << name;
    }
  }
}

TEST_F(CalibratedCuda, SearchesInARotatedBasisChooseWhatTheCpuChooses) {
  const Scheme scheme = parse_scheme("kbit3-b32-e4m4");
  const Layer layer(200, 300);
  const formats::InputRotation rotation({64, 42}, layer.k);
  const std::vector<AwqLinear> linears = {{layer.weight, test::in_basis(rounding_of(scheme, layer.k, {}), rotation)}};
  const auto cpu = search_scales(linears, {layer.mean_abs, layer.gram_view(), {}, {}});
  GroupCuda group(*work, gram(layer));
  const auto measured = group.add(layer.view(), scheme, {});
  const auto found = group.search({layer.mean_abs, {}, {}, {}}, measured.plain, &rotation);
  EXPECT_NEAR(found.plain_error, cpu.plain_error, 1e-4 * cpu.plain_error);
  EXPECT_NEAR(found.error, cpu.error, 1e-4 * cpu.error);
  EXPECT_EQ(found.point.alpha, cpu.point.alpha);
}

TEST_F(CalibratedCuda, ClipsAreTheCpus) {
  for (const char* name : {"int4-g128-f16-asym", "int3-g32-f16"}) {
    const Scheme scheme = parse_scheme(name);
    const Layer layer(200, 300);
    RandomMatrix clipped = layer.weight;
    const auto cpu = search_clip(clipped, layer.gram_view(), rounding_of(scheme, layer.k, {}));
    auto weight = device::DeviceBuffer::copy_of(bytes_of(layer.weight.values), work->stream);
    const auto gpu = search_clip_cuda(*work, {weight.as<float>(), layer.n, scheme, Clip::min_max, {}}, *gram(layer));
    EXPECT_NEAR(gpu.plain_error, cpu.plain_error, 1e-4 * cpu.plain_error) << name;
    EXPECT_NEAR(gpu.error, cpu.error, 1e-3 * cpu.error) << name;
    EXPECT_LT(gpu.error, gpu.plain_error);
    const auto found = work->fetch(weight.as<float>(), layer.n * layer.k);
    size_t equal = 0;
    for (size_t i = 0; i < found.size(); ++i) equal += found[i] == clipped.values[i] ? 1 : 0;
    // A choice that is a tie but for rounding moves what comes after it in its row.
    EXPECT_GE(static_cast<double>(equal), 0.99 * static_cast<double>(found.size())) << name;
    EXPECT_NEAR(static_cast<double>(gpu.clipped_blocks), static_cast<double>(cpu.clipped_blocks),
                0.01 * static_cast<double>(cpu.clipped_blocks) + 1);
  }
}

TEST_F(CalibratedCuda, WithoutFeedbackTheBytesAreTheCpus) {
  for (const char* name : {"int4-g128-f16-asym", "int8-g32-f32", "int3-row-bf16-asym", "kbit2-b32-e4m4",
                           "kbit3-b32-e4m4", "kbit4-b32-f16", "kbit5-b32-e4m4", "kbit5-b32-f16"}) {
    const Scheme scheme = parse_scheme(name);
    const Layer layer(70, 333);
    for (const bool search : {false, true}) {
      const auto cpu = on_cpu(layer, scheme, options_for(scheme, search), false);
      GroupCuda group(*work, gram(layer));
      group.add(layer.view(), scheme, options_for(scheme, search));
      const auto gpu = group.pack(0, options_for(scheme, search), {});
      EXPECT_TRUE(bytes_equal(gpu.result.weight, cpu.weight)) << name << (search ? " searched" : "");
      EXPECT_EQ(gpu.result.stats.blocks, cpu.stats.blocks) << name;
      EXPECT_EQ(gpu.result.stats.zero_blocks, cpu.stats.zero_blocks) << name;
      EXPECT_EQ(gpu.result.stats.subnormal_scales, cpu.stats.subnormal_scales) << name;
      EXPECT_EQ(gpu.result.stats.range_exponent, cpu.stats.range_exponent) << name;
      const double error = layer.error(gpu.result.weight);
      EXPECT_NEAR(gpu.error, error, 1e-4 * error) << name;
    }
  }
}

TEST_F(CalibratedCuda, SearchesWithoutCalibrationGiveTheBytesOfTheCpu) {
  const QuantizerRow& row = quantizer_row("kbit");
  for (const char* name : {"kbit2-b32-f16", "kbit3-b32-e4m4", "kbit4-b32-f16", "kbit5-b32-e4m4"}) {
    const Scheme scheme = parse_scheme(name);
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {37, 97}, {300, 64}}) {
      for (const auto& distribution : test::distributions) {
        const auto values = test::sample(distribution, n, k);
        for (const bool learn : {false, true}) {
          QuantizeOptions options;
          options.steps = parse_steps(learn ? "lloyd+search" : "search");
          const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
          const auto cpu = row.run(view, scheme, options);
          const auto gpu = row.run_cuda(view, scheme, options, test::gpu());
          ASSERT_TRUE(bytes_equal(gpu.weight, cpu.weight))
              << name << " " << n << " × " << k << (learn ? " learned" : "");
          EXPECT_EQ(gpu.stats.zero_blocks, cpu.stats.zero_blocks);
          EXPECT_EQ(gpu.stats.subnormal_scales, cpu.stats.subnormal_scales);
          EXPECT_EQ(gpu.stats.range_exponent, cpu.stats.range_exponent);
        }
      }
    }
  }
}

/// Of long rows every second one is looked at; the last panel has one row.
TEST_F(CalibratedCuda, TablesOfASampleAreTheCpus) {
  const Scheme scheme = parse_scheme("kbit2-b32-f16");
  const int64_t n = 33, k = 65536 + 7;
  ASSERT_EQ(learning_stride(n, k), 2);
  RandomMatrix weight(n, k, 8);
  std::fill_n(weight.values.begin(), 100, 0.0f);  // blocks of zeros among them
  QuantizeOptions options;
  options.steps = parse_steps("lloyd");
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(weight.values)};
  const auto& row = quantizer_row("kbit");
  EXPECT_TRUE(
      bytes_equal(row.run_cuda(view, scheme, options, test::gpu()).weight, row.run(view, scheme, options).weight));
}

/// Two weights of different size and shape learn one table, and are packed with it; rows of one are divided.
TEST_F(CalibratedCuda, TablesInCommonAreTheCpus) {
  const Scheme scheme = parse_scheme("kbit3-b32-e4m4");
  Layer layer(70, 333);
  RandomMatrix second(40, 333, 5);
  for (float& value : second.values) value *= 37;
  const std::vector<float> divisors(40, 0.5f);
  GroupCuda group(*work, gram(layer));
  const QuantizeOptions options = options_for(scheme, true);
  group.add(layer.view(), scheme, options);
  group.add({"v", DType::f32, {40, 333}, bytes_of(second.values)}, scheme, options);
  const std::vector<GroupCuda::Member> members{{0, {}}, {1, divisors}};
  const SharedTable gpu = group.learn_table(members, options);

  for (float& value : second.values) value /= 0.5f;
  const std::vector<TensorView> views{layer.view(), {"v", DType::f32, {40, 333}, bytes_of(second.values)}};
  BlockMaxima extremes;
  for (const TensorView& view : views) {
    const auto maxima = find_block_maxima(view);
    join_extremes(extremes, maxima.smallest, maxima.largest);
  }
  std::vector<float> squares;
  for (int64_t c = 0; c < layer.k; ++c) squares.push_back(layer.gram_view().row(c)[c]);
  const CalibratedInput input{squares};
  QuantizeOptions calibrated = options;
  calibrated.input = &input;
  const SharedTable cpu =
      learn_shared_table(views, scheme, extremes, channel_importance(calibrated, layer.k), calibrated);
  EXPECT_EQ(gpu.table, cpu.table);
  EXPECT_EQ(gpu.factor, cpu.factor);

  calibrated.table = cpu.table;
  calibrated.tensor_factor = cpu.factor;
  const auto packed = group.pack(0, calibrated, {});
  EXPECT_TRUE(
      bytes_equal(packed.result.weight, rounding_quantizer(scheme).run(layer.view(), scheme, calibrated).weight));
  EXPECT_EQ(packed.result.stats.range_exponent, std::ilogb(cpu.factor));
}

TEST_F(CalibratedCuda, FactorsAgree) {
  const Layer layer(1, 300);
  const ErrorFactor cpu(layer.gram_view(), 32, 0.01, "w");
  const ErrorFactorCuda gpu(*work, *gram(layer), 32, 0.01, "w");
  EXPECT_TRUE(std::ranges::equal(gpu.order().columns, cpu.order()));
  EXPECT_TRUE(std::ranges::equal(gpu.order().starts, cpu.block_starts()));
  EXPECT_EQ(gpu.damping(), cpu.damping());
  const auto pivots = work->fetch(gpu.pivots(), layer.k);
  const auto coupling = work->fetch(gpu.coupling(), layer.k * layer.k);
  // Both factor in fp64 and round once to fp32; the matrix' condition is far from using up the 29 bits between them.
  for (int64_t i = 0; i < layer.k; ++i) {
    EXPECT_NEAR(pivots[static_cast<size_t>(i)], cpu.pivots()[static_cast<size_t>(i)], 1e-6);
    for (int64_t j = 0; j < layer.k; ++j) {
      ASSERT_NEAR(coupling[static_cast<size_t>(i * layer.k + j)], cpu.coupling().row(i)[j], 1e-6);
    }
  }
}

TEST_F(CalibratedCuda, AMatrixWithoutFullRankIsDampedAsOnTheCpu) {
  const Layer layer(1, 128, 20);
  const ErrorFactor cpu(layer.gram_view(), 32, 0, "w");
  const ErrorFactorCuda gpu(*work, *gram(layer), 32, 0, "w");
  EXPECT_GT(gpu.damping(), 0);
  EXPECT_EQ(gpu.damping(), cpu.damping());
}

TEST_F(CalibratedCuda, FeedbackGainsWhatItGainsOnTheCpu) {
  for (const char* name : {"int4-g128-f16-asym", "int3-g32-f16", "int4-row-f16", "int4-g256-f16-asym", "kbit3-b32-e4m4",
                           "kbit4-b32-f16"}) {
    const Scheme scheme = parse_scheme(name);
    const Layer layer(130, 620);
    for (const bool search : {false, true}) {
      const auto cpu = on_cpu(layer, scheme, options_for(scheme, search), true);
      GroupCuda group(*work, gram(layer));
      group.add(layer.view(), scheme, options_for(scheme, search));
      auto options = options_for(scheme, search);
      options.steps.add({StepKind::feedback});
      const auto gpu = group.pack(0, options, {});
      const double error = layer.error(gpu.result.weight), expected = layer.error(cpu.weight);
      EXPECT_NEAR(gpu.error, error, 1e-4 * error) << name;
      // A code that falls to the other side of a threshold by rounding changes the rest of its row, for no worse.
      EXPECT_NEAR(error, expected, 0.01 * expected) << name << (search ? " searched" : "");
      const auto a = test::decode(gpu.result.weight), b = test::decode(cpu.weight);
      size_t equal = 0;
      for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i] ? 1 : 0;
      EXPECT_GE(static_cast<double>(equal), 0.95 * static_cast<double>(a.size())) << name;
    }
  }
}

TEST_F(CalibratedCuda, AWeightThatIsNotFiniteIsNamed) {
  Layer layer(3, 40);
  layer.weight.values[57] = NAN;
  GroupCuda group(*work, gram(layer));
  test::expect_error(ErrorCode::bad_file, {"w", "row 1", "column 17"},
                     [&] { group.add(layer.view(), parse_scheme("int4-g32-f16"), {}); });
}

}  // namespace
}  // namespace w4q::quantize
