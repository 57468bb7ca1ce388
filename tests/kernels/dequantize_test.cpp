#include "kernels/dequantize/dequantize.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>

#include "core/rng.h"
#include "formats/codebook.h"
#include "formats/lut.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

formats::PackedWeight packed(const formats::Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  const RandomMatrix weight(n, k, seed);
  if (scheme.family == formats::SchemeFamily::exl3) {  // any codes will do, and searching them takes long
    formats::PackedWeight drawn = formats::allocate_canonical(scheme, n, k);
    uint64_t draw = 0;
    for (auto& plane : drawn.planes) {
      for (uint16_t& word : plane.bytes.as<uint16_t>())
        word = static_cast<uint16_t>(random_bits(seed, draw++) & 0xBFFF);
    }
    return drawn;
  }
  std::vector<float> table;
  if (scheme.family == formats::SchemeFamily::kbit) table = formats::codebook("nf", scheme.bits);
  if (scheme.family == formats::SchemeFamily::rotated) table = formats::codebook("normal", scheme.bits);
  if (scheme.family == formats::SchemeFamily::lut)
    table.assign(formats::nf4_table().begin(), formats::nf4_table().end());
  if (scheme.family == formats::SchemeFamily::small_float) {
    table.assign(formats::small_float_table(scheme.bits).begin(), formats::small_float_table(scheme.bits).end());
  }
  return formats::scheme_row(scheme.family).encode(scheme, weight.values, n, k, table);
}

std::vector<formats::Scheme> all_schemes() {
  std::vector<formats::Scheme> schemes;
  for (const auto& row : formats::scheme_registry()) {
    for (const auto& scheme : row.schemes()) schemes.push_back(scheme);
  }
  return schemes;
}

class DequantizeSchemes : public testing::TestWithParam<formats::Scheme> {};

void expect_reference_bits(const formats::PackedWeight& weight) {
  RandomMatrix fast(3, weight.k, 7);
  dequantize_rows(weight, 1, fast);
  std::vector<float> reference(static_cast<size_t>(weight.k));
  for (int64_t r = 0; r < 3; ++r) {
    formats::scheme_row(weight.scheme.family).decode_row(weight, 1 + r, reference);
    for (size_t i = 0; i < reference.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(fast.row(r)[i]), std::bit_cast<uint32_t>(reference[i]))
          << "k " << weight.k << " row " << r << " column " << i;
    }
  }
}

TEST_P(DequantizeSchemes, EqualsTheReferenceDecoderBitForBitOnEveryInstructionSet) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (const int64_t k : {1, 31, 32, 33, 96, 200}) {
      expect_reference_bits(packed(GetParam(), 5, k, static_cast<uint64_t>(k)));
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, DequantizeSchemes, testing::ValuesIn(all_schemes()), [](const auto& param) {
  std::string name = formats::to_string(param.param);
  std::ranges::replace(name, '-', '_');
  return name;
});

/// Rows from one strip of a trellis to the next, in columns that fill no vector.
TEST(Dequantize, RowsOfATrellisAcrossStrips) {
  constexpr int64_t n = 140, k = 75;
  const auto weight = packed(formats::parse_scheme("trellis3-w10"), n, k, 5);
  RandomMatrix fast(20, k, 6);
  dequantize_rows(weight, 118, fast);
  std::vector<float> reference(k);
  for (int64_t r = 0; r < 20; ++r) {
    formats::scheme_row(weight.scheme.family).decode_row(weight, 118 + r, reference);
    EXPECT_TRUE(std::equal(reference.begin(), reference.end(), fast.row(r))) << r;
  }
}

TEST(Dequantize, AddsPassesInOrder) {
  const int64_t n = 4, k = 70;
  formats::PackedLinear linear;
  linear.passes.push_back(packed({.bits = 3}, n, k, 1));
  linear.passes.push_back(packed({.bits = 2}, n, k, 2));
  RandomMatrix sum(n, k, 3), first(n, k, 4), second(n, k, 5);
  dequantize_rows(linear, 0, sum);
  dequantize_rows(linear.passes[0], 0, first);
  dequantize_rows(linear.passes[1], 0, second);
  for (size_t i = 0; i < sum.values.size(); ++i) EXPECT_EQ(sum.values[i], first.values[i] + second.values[i]);
}

TEST(Dequantize, RefusesRowsThatAreNotThere) {
  const auto weight = packed({.bits = 4}, 4, 32, 1);
  RandomMatrix out(2, 32, 2);
  test::expect_error(ErrorCode::internal, {"rows"}, [&] { dequantize_rows(weight, 3, out); });
}

}  // namespace
}  // namespace w4q::kernels
