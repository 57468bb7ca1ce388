#include "formats/codebook.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

double density(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi); }

/// Φ⁻¹ of a probability in [0.5, 1) by bisection on the upper tail.
double quantile(double probability) {
  double low = 0;
  double high = 10;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(middle / std::numbers::sqrt2) > 1 - probability ? low : high) = middle;
  }
  return low;
}

class Codebooks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Bits, Codebooks, testing::Values(2, 3, 4, 5));

TEST_P(Codebooks, NfHoldsExpectedValuesOfEquallyLikelyBins) {
  const int bits = GetParam();
  const int half = 1 << (bits - 1);
  std::vector<double> means;
  for (int i = 0; i < half; ++i) {
    const double from = density(quantile(0.5 + 0.5 * i / half));
    const double to = i + 1 == half ? 0 : density(quantile(0.5 + 0.5 * (i + 1) / half));
    means.push_back(2 * half * (from - to));
  }
  const std::vector<float> table = codebook("nf", bits);
  for (int i = 0; i < half; ++i) {
    // The bisection is good to about 1e-14: far less than half an ulp of fp32, so the rounded values agree.
    EXPECT_EQ(table[static_cast<size_t>(half + i)], static_cast<float>(means[static_cast<size_t>(i)] / means.back()));
  }
}

TEST_P(Codebooks, AreMirroredAscendingAndReachOne) {
  for (const CodebookRow& row : codebook_registry()) {
    const std::vector<float> table = codebook(row.name, GetParam());
    check_codebook(table, GetParam(), row.name);
    EXPECT_EQ(table.back(), 1.0f);
    for (size_t i = 0; i < table.size(); ++i) EXPECT_EQ(table[i], -table[table.size() - 1 - i]);
  }
}

TEST_P(Codebooks, NfQuantileIsThePeersTableBitForBit) {
  const std::string file = "bnb_kbit_k" + std::to_string(GetParam()) + ".safetensors";
  const auto golden = io::Checkpoint::open(test::testdata() / "golden" / file);
  const auto expected = golden.load("codebook");
  const std::vector<float> table = codebook("nf-quantile", GetParam());
  ASSERT_EQ(expected->bytes.size(), table.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(expected->bytes.data(), table.data(), expected->bytes.size()), 0);
}

TEST(Codebook, UnknownNamesAndWidthsAreRefused) {
  test::expect_error(ErrorCode::bad_argument, {"nf9", "nf-quantile"}, [] { codebook("nf9", 4); });
  test::expect_error(ErrorCode::bad_argument, {"6 bits"}, [] { codebook("nf", 6); });
}

TEST(Codebook, ParsesTextAndJsonAndScalesToOne) {
  const std::vector<float> expected{-1.0f, -0.25f, 0.0f, 0.5f};
  EXPECT_EQ(parse_codebook("-4 -1\n0 2\n", 2, "t"), expected);
  EXPECT_EQ(parse_codebook("[-4.0, -1, 0, 2e0]", 2, "t"), expected);
  EXPECT_EQ(parse_codebook("-1,-.25,0,.5", 2, "t"), expected);
}

TEST(Codebook, ParsingRefusesWhatIsNotATable) {
  const auto refuse = [](std::string_view text, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::bad_file, parts, [&] { parse_codebook(text, 2, "my.txt"); });
  };
  refuse("", {"my.txt", "expected 4", "got 0"});
  refuse("1 2 3", {"expected 4", "got 3"});
  refuse("1 2 3 4 5", {"more than 4"});
  refuse("1 2 x 4", {"entry 2", "\"x\""});
  refuse("1 2 3;4 5", {"entry 2"});
  refuse("1 nan 3 4", {"entry 1"});
  refuse("1 inf 3 4", {"entry 1"});
  refuse("1e999 2 3 4", {"entry 0"});
  refuse("0 0 0 0", {"do not ascend"});
  refuse("4 3 2 1", {"entries 0 and 1 do not ascend"});
  refuse("0 1e-12 0.5 1", {"too close"});
}

TEST(Codebook, CheckNamesTheBadEntry) {
  std::vector<float> table = codebook("nf", 3);
  table[5] = std::numeric_limits<float>::quiet_NaN();
  test::expect_error(ErrorCode::bad_file, {"w.codebook", "entry 5"}, [&] { check_codebook(table, 3, "w.codebook"); });
  table[5] = std::numeric_limits<float>::infinity();
  test::expect_error(ErrorCode::bad_file, {"entry 5"}, [&] { check_codebook(table, 3, "w.codebook"); });
  const float huge = std::numeric_limits<float>::max();
  check_codebook(std::vector<float>{-huge, 0.0f, 0.5f * huge, huge}, 2, "ends of fp32");
}

}  // namespace
}  // namespace w4q::formats
