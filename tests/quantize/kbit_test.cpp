#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "kbit_samples.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

Scheme kbit(int bits, ScaleType scale = ScaleType::e4m4) { return {formats::SchemeFamily::kbit, bits, 32, scale}; }

/// A matrix in one of the weight types at an odd address, and the fp32 values that it holds.
class Matrix {
 public:
  Matrix(std::span<const float> values, DType dtype, int64_t n, int64_t k)
      : dtype_(dtype), n_(n), k_(k), storage_(1 + values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8) {
    narrow(values, dtype, bytes());
    values_.resize(values.size());
    widen(bytes(), dtype, values_);
  }
  TensorView view() { return {"layers.0.up.weight", dtype_, {n_, k_}, bytes()}; }
  std::span<const float> values() const { return values_; }

 private:
  std::span<std::byte> bytes() { return std::span(storage_).subspan(1); }

  DType dtype_;
  int64_t n_;
  int64_t k_;
  std::vector<std::byte> storage_;
  std::vector<float> values_;
};

QuantizeResult quantize(Matrix& matrix, const Scheme& scheme, const QuantizeOptions& options = {}) {
  return quantizer_row("kbit").run(matrix.view(), scheme, options);
}

/// The plain definition, given the codebook that the quantizer stored.
PackedWeight reference(const Matrix& matrix, const PackedWeight& quantized) {
  const auto codebook = quantized.plane(PlaneRole::codebook).bytes.as<float>();
  return formats::scheme_row(quantized.scheme.family)
      .encode(quantized.scheme, matrix.values(), quantized.n, quantized.k, codebook);
}

/// Values that f16 and bf16 hold without overflow, in every block magnitudes of their own.
std::vector<float> any_type_values(int64_t n, int64_t k) {
  return test::sample({"",
                       [](uint64_t s, uint64_t i) {
                         return test::draw_normal(s, i) *
                                std::exp2(static_cast<float>(random_bits(s + 1, i / 32) % 16) - 12.0f);
                       }},
                      n, k);
}

constexpr int64_t lengths[] = {1, 31, 32, 33, 64, 95, 1408, 4129};

class InstructionSets : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<int64_t> supported_targets() { return hwy::SupportedAndGeneratedTargets(); }
INSTANTIATE_TEST_SUITE_P(All, InstructionSets, testing::ValuesIn(supported_targets()),
                         [](const auto& param) { return std::string(hwy::TargetName(param.param)); });

TEST_P(InstructionSets, GiveTheBytesOfTheDefinition) {
  for (int64_t k : lengths) {
    const std::vector<float> values = any_type_values(3, k);
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      Matrix matrix(values, dtype, 3, k);
      for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
        for (int bits = 2; bits <= 5; ++bits) {
          const QuantizeResult result = quantize(matrix, kbit(bits, scale));
          EXPECT_TRUE(bytes_equal(result.weight, reference(matrix, result.weight)))
              << to_string(result.weight.scheme) << " " << dtype_name(dtype) << " k=" << k;
        }
      }
    }
  }
}

TEST_P(InstructionSets, GiveTheBytesOfTheDefinitionForEveryDistribution) {
  for (const test::Distribution& distribution : test::distributions) {
    Matrix matrix(test::sample(distribution, 4, 200), DType::f32, 4, 200);
    for (int bits = 2; bits <= 5; ++bits) {
      const QuantizeResult result = quantize(matrix, kbit(bits));
      EXPECT_TRUE(bytes_equal(result.weight, reference(matrix, result.weight))) << distribution.name << " " << bits;
    }
  }
}

TEST_P(InstructionSets, PutTiesOnTheLowerCode) {
  // Scale 1 exactly, then values on every midpoint and on both sides of it.
  for (int bits = 2; bits <= 5; ++bits) {
    const std::vector<float> table = formats::codebook("nf", bits);
    std::vector<float> midpoints(table.size() - 1);
    formats::kbit_midpoints(table, midpoints);
    std::vector<float> values;
    for (float midpoint : midpoints) {
      if (values.size() % 32 == 0) values.push_back(1.0f);
      for (float x : {midpoint, std::nextafter(midpoint, -2.0f), std::nextafter(midpoint, 2.0f)}) {
        if (values.size() % 32 == 0) values.push_back(1.0f);
        values.push_back(x);
      }
    }
    const auto k = static_cast<int64_t>(values.size());
    Matrix matrix(values, DType::f32, 1, k);
    const QuantizeResult result = quantize(matrix, kbit(bits));
    EXPECT_TRUE(bytes_equal(result.weight, reference(matrix, result.weight))) << bits;
  }
}

TEST(KbitQuantizer, BytesDoNotDependOnThreads) {
  Matrix matrix(any_type_values(301, 300), DType::bf16, 301, 300);
  for (int bits : {3, 4}) {
    const PackedWeight expected = reference(matrix, quantize(matrix, kbit(bits)).weight);
    for (int count : {1, 2, 3, 7}) {
      set_threads(count);
      const QuantizeResult result = quantize(matrix, kbit(bits));
      EXPECT_TRUE(bytes_equal(result.weight, expected)) << count;
      EXPECT_EQ(result.stats.blocks, 301 * 10);
    }
    set_threads(0);
  }
}

TEST(KbitQuantizer, EveryBlockKeepsItsBoundAtEveryMagnitude) {
  const auto& row = formats::scheme_row(formats::SchemeFamily::kbit);
  for (const test::Distribution& distribution : test::distributions) {
    const std::vector<float> values = test::sample(distribution, 8, 333);
    Matrix matrix(values, DType::f32, 8, 333);
    for (const Scheme& scheme : row.schemes()) {
      const QuantizeResult result = quantize(matrix, scheme);
      row.validate(result.weight, "w");
      const auto codebook = result.weight.plane(PlaneRole::codebook).bytes.as<float>();
      const std::vector<float> decoded = test::decode(result.weight);
      for (size_t i = 0; i < values.size(); ++i) {
        const auto line = std::span(values).subspan(i / 333 * 333, 333);
        const double bound = row.error_bound(scheme, test::block_absmax_at(line, i % 333), codebook);
        ASSERT_LE(std::abs(static_cast<double>(values[i]) - static_cast<double>(decoded[i])), bound)
            << distribution.name << " " << to_string(scheme) << " at " << i;
      }
    }
  }
}

TEST(KbitQuantizer, MagnitudeCostsNoPrecision) {
  const std::vector<float> values = test::sample(test::distributions[0], 64, 512);
  for (int bits = 2; bits <= 5; ++bits) {
    Matrix plain(values, DType::f32, 64, 512);
    const double expected = test::sqnr(values, test::decode(quantize(plain, kbit(bits)).weight));
    for (float magnitude : {1e-30f, 1e-9f, 1e6f, 1e30f}) {
      std::vector<float> scaled = values;
      for (float& value : scaled) value *= magnitude;
      Matrix matrix(scaled, DType::f32, 64, 512);
      const QuantizeResult result = quantize(matrix, kbit(bits));
      EXPECT_NE(result.stats.range_exponent, 0);
      EXPECT_EQ(result.stats.saturated_scales + result.stats.subnormal_scales, 0) << magnitude;
      // Other magnitudes round other scales up and down: a few hundredths of a dB either way, measured.
      EXPECT_NEAR(test::sqnr(scaled, test::decode(result.weight)), expected, 0.05) << magnitude;
    }
  }
}

TEST(KbitQuantizer, CountsWhatHappenedToBlocks) {
  std::vector<float> values(5 * 32, 0.5f);
  std::fill_n(values.begin() + 32, 32, 0.0f);
  std::fill_n(values.begin() + 64, 32, 20.0f);
  std::fill_n(values.begin() + 96, 32, 1e-4f);   // a subnormal scale
  std::fill_n(values.begin() + 128, 32, 1e-7f);  // rounds to zero
  Matrix matrix(values, DType::f32, 1, 5 * 32);
  const QuantizeStats stats = quantize(matrix, kbit(4)).stats;
  EXPECT_EQ(stats.blocks, 5);
  EXPECT_EQ(stats.zero_blocks, 1);
  EXPECT_EQ(stats.saturated_scales, 0);
  EXPECT_EQ(stats.subnormal_scales, 2);
  EXPECT_EQ(stats.range_exponent, 0);
}

TEST(KbitQuantizer, NamesTheFirstNanAndInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<float> values = any_type_values(70, 77);
    values[69 * 77 + 5] = nan;
    Matrix late(values, dtype, 70, 77);
    test::expect_error(ErrorCode::bad_file, {"layers.0.up.weight", "NaN at row 69, column 5"},
                       [&] { quantize(late, kbit(4)); });
    values[40 * 77 + 76] = -infinity;  // in a ragged tail
    Matrix early(values, dtype, 70, 77);
    test::expect_error(ErrorCode::bad_file, {"infinity at row 40, column 76"}, [&] { quantize(early, kbit(4)); });
  }
}

TEST(KbitQuantizer, TakesATableOfTheUsersOwn) {
  QuantizeOptions options;
  options.table = formats::parse_codebook("-4 -1 0.5 3", 2, "t");
  Matrix matrix(any_type_values(4, 100), DType::f32, 4, 100);
  const QuantizeResult result = quantize(matrix, kbit(2), options);
  EXPECT_TRUE(bytes_equal(result.weight, reference(matrix, result.weight)));
  const auto stored = result.weight.plane(PlaneRole::codebook).bytes.as<float>();
  EXPECT_EQ(stored[1], std::ldexp(-0.25f, result.stats.range_exponent));
  test::expect_error(ErrorCode::bad_file, {"expected 8", "got 4"}, [&] { quantize(matrix, kbit(3), options); });
  options.table[0] = -2.0f;
  test::expect_error(ErrorCode::bad_argument, {"largest magnitude of 1"}, [&] { quantize(matrix, kbit(2), options); });
}

TEST(KbitQuantizer, RefusesWhatIsNotAMatrixOfWeights) {
  Matrix matrix(any_type_values(4, 100), DType::f32, 4, 100);
  const auto run = [&](const TensorView& view, const Scheme& scheme) { quantizer_row("kbit").run(view, scheme, {}); };
  TensorView view = matrix.view();
  view.shape = {400};
  test::expect_error(ErrorCode::unsupported, {"[400]", "matrix"}, [&] { run(view, kbit(4)); });
  view.shape = {0, 100};
  test::expect_error(ErrorCode::unsupported, {"0 outputs"}, [&] { run(view, kbit(4)); });
  view.shape = {4, 101};
  test::expect_error(ErrorCode::bad_argument, {"bytes"}, [&] { run(view, kbit(4)); });
  view.shape = {formats::max_dimension, formats::max_dimension};
  test::expect_error(ErrorCode::bad_argument, {"bytes"}, [&] { run(view, kbit(4)); });
  view = matrix.view();
  view.dtype = DType::i32;
  test::expect_error(ErrorCode::unsupported, {"I32"}, [&] { run(view, kbit(4)); });
  test::expect_error(ErrorCode::bad_argument, {"kbit7-b32-e4m4"}, [&] { run(matrix.view(), kbit(7)); });
  test::expect_error(ErrorCode::bad_argument, {"awq", "kbit"}, [] { quantizer_row("awq"); });
}

}  // namespace
}  // namespace w4q::quantize
