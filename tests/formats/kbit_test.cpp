#include "formats/kbit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "formats/codebook.h"
#include "formats/e4m4.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

constexpr Scheme kbit2{SchemeFamily::kbit, 2, 32, ScaleType::e4m4};

TEST(Kbit, TiesGoToTheLowerCode) {
  const std::vector<float> table{-1.0f, 0.0f, 0.5f, 1.0f};
  std::vector<float> midpoints(3);
  kbit_midpoints(table, midpoints);
  EXPECT_EQ(midpoints, (std::vector<float>{-0.5f, 0.25f, 0.75f}));
  EXPECT_EQ(kbit_code(-0.5f, midpoints), 0);
  EXPECT_EQ(kbit_code(0.25f, midpoints), 1);
  EXPECT_EQ(kbit_code(std::nextafter(0.25f, 1.0f), midpoints), 2);
  EXPECT_EQ(kbit_code(5.0f, midpoints), 3);
  EXPECT_EQ(kbit_code(-5.0f, midpoints), 0);
}

TEST(Kbit, EncodesAWorkedExample) {
  // Row of 34: one block of a ramp, and a tail of two. Table maxima 1, absmax 1.5 → E4M4 0xB8 exactly.
  const std::vector<float> table{-1.0f, -0.25f, 0.25f, 1.0f};
  std::vector<float> values(34, 0.0f);
  values[0] = 1.5f;    // 1 → code 3
  values[1] = -1.5f;   // −1 → code 0
  values[2] = 0.375f;  // 0.25 → code 2
  values[33] = -0.5f;  // its own block: scale 0.5, code 0; values[32] = 0 ties between −0.25 and 0.25: code 1
  const PackedWeight weight = scheme_row(SchemeFamily::kbit).encode(kbit2, values, 1, 34, table);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto scales = weight.plane(PlaneRole::scales).bytes.as<uint8_t>();
  ASSERT_EQ(words.size(), 4u);
  EXPECT_EQ(words[0], 0xFFFFFFF9u);  // bit 0: codes 3, 0, 2, 1, 1, …
  EXPECT_EQ(words[1], 0x00000005u);  // bit 1
  EXPECT_EQ(words[2], 0x00000001u);  // tail: codes 1, 0, then zero bits
  EXPECT_EQ(words[3], 0u);
  EXPECT_EQ(scales[0], 0xB8);
  EXPECT_EQ(scales[1], 0xA0);
  const std::vector<float> decoded = test::decode(weight);
  EXPECT_EQ(decoded[0], 1.5f);
  EXPECT_EQ(decoded[1], -1.5f);
  EXPECT_EQ(decoded[2], 0.375f);
  EXPECT_EQ(decoded[3], -0.375f);
  EXPECT_EQ(decoded[32], -0.125f);
  EXPECT_EQ(decoded[33], -0.5f);
}

TEST(Kbit, BlockThatIsTooSmallForItsScaleDecodesToZero) {
  const std::vector<float> values(32, 0x1p-16f);  // below half of the smallest scale 2^-14
  const PackedWeight weight = scheme_row(SchemeFamily::kbit).encode(kbit2, values, 1, 32, codebook("nf", 2));
  EXPECT_EQ(weight.plane(PlaneRole::scales).bytes.as<uint8_t>()[0], 0);
  // All codes are that of 0, here 1 of 0 … 3: the tie goes down.
  EXPECT_EQ(weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[0], ~0u);
  EXPECT_EQ(weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[1], 0u);
  for (float value : test::decode(weight)) EXPECT_EQ(value, 0.0f);
}

TEST(Kbit, EncodeRefusesWrongSizesValuesAndTables) {
  const SchemeRow& row = scheme_row(SchemeFamily::kbit);
  std::vector<float> values(64, 1.0f);
  const std::vector<float> table = codebook("nf", 2);
  test::expect_error(ErrorCode::bad_argument, {"64"}, [&] { row.encode(kbit2, values, 3, 32, table); });
  test::expect_error(ErrorCode::bad_file, {"expected 4"}, [&] { row.encode(kbit2, values, 2, 32, codebook("nf", 3)); });
  values[40] = std::numeric_limits<float>::infinity();
  test::expect_error(ErrorCode::bad_argument, {"row 1, column 8"}, [&] { row.encode(kbit2, values, 2, 32, table); });
}

class RangeExponent : public testing::TestWithParam<ScaleType> {};
INSTANTIATE_TEST_SUITE_P(Scales, RangeExponent, testing::Values(ScaleType::e4m4, ScaleType::f16),
                         [](const auto& param) { return std::string(to_string(param.param)); });

TEST_P(RangeExponent, IsZeroInsideTheNormalRange) {
  const float low = scale_codec(GetParam()).smallest_normal;
  const float high = scale_codec(GetParam()).largest;
  EXPECT_EQ(kbit_range_exponent(low, high, GetParam()), 0);
  EXPECT_EQ(kbit_range_exponent(0, 0, GetParam()), 0);
  EXPECT_NE(kbit_range_exponent(low / 2, low / 2, GetParam()), 0);
  EXPECT_EQ(kbit_range_exponent(low, std::nextafter(high, 1e9f), GetParam()), 1);
}

TEST_P(RangeExponent, IsTheLeastThatKeepsTheLargestRepresentable) {
  const float scale_max = scale_codec(GetParam()).largest;
  for (int i = 0; i < 2000; ++i) {
    const float largest =
        std::ldexp(static_cast<float>(1 + random_uniform(7, static_cast<uint64_t>(i))), i % 250 - 125);
    const int e = kbit_range_exponent(largest, largest, GetParam());
    if (e == 0) continue;
    // The lowest exponent keeps the entries of a table normal, the highest keeps its products finite.
    const bool clamped_low = e == -119;
    const bool clamped_high = std::ldexp(1.0, e) * static_cast<double>(scale_max) > 0x1.ep127;
    EXPECT_TRUE(clamped_high || static_cast<double>(largest) <= std::ldexp(static_cast<double>(scale_max), e))
        << largest;
    EXPECT_TRUE(clamped_low || static_cast<double>(largest) > std::ldexp(static_cast<double>(scale_max), e - 1))
        << largest;
  }
}

TEST_P(RangeExponent, KeepsTablesNormalAndProductsFiniteAtTheEndsOfFp32) {
  const float largest = std::numeric_limits<float>::max();
  const float smallest = std::numeric_limits<float>::denorm_min();
  for (const CodebookRow& row : codebook_registry()) {
    const std::vector<float> table = codebook(row.name, 5);
    for (float entry : kbit_scaled_codebook(table, kbit_range_exponent(smallest, smallest, GetParam()))) {
      EXPECT_TRUE(std::isnormal(entry));
    }
    for (float entry : kbit_scaled_codebook(table, kbit_range_exponent(smallest, largest, GetParam()))) {
      EXPECT_TRUE(std::isfinite(entry * scale_codec(GetParam()).largest));
    }
  }
}

TEST(Kbit, ScalesSaturateAndSaySo) {
  EXPECT_FALSE(store_scale(31.4f, ScaleType::e4m4).saturated);
  const StoredScale e4m4 = store_scale(40.0f, ScaleType::e4m4);
  EXPECT_TRUE(e4m4.saturated);
  EXPECT_EQ(e4m4.value, 31.0f);
  const StoredScale f16 = store_scale(1e9f, ScaleType::f16);
  EXPECT_TRUE(f16.saturated);
  EXPECT_EQ(f16.value, 65504.0f);
  EXPECT_EQ(store_scale(1.5f, ScaleType::e4m4).value, 1.5f);
}

/// On N(0,1) in blocks of 32. The floors for E4M4 are those the project promises; f16 must not be worse than E4M4.
TEST(Kbit, SignalToNoiseOnNormalWeights) {
  constexpr double floors[] = {7.4, 14.8, 20.6, 25.3};
  const std::vector<float> values = test::sample(test::distributions[0], 256, 1024);
  for (int bits = 2; bits <= 5; ++bits) {
    double found[2] = {};
    for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
      const Scheme scheme{SchemeFamily::kbit, bits, 32, scale};
      const auto weight = scheme_row(SchemeFamily::kbit).encode(scheme, values, 256, 1024, codebook("nf", bits));
      found[scale == ScaleType::f16] = test::sqnr(values, test::decode(weight));
    }
    EXPECT_GE(found[0], floors[bits - 2]) << bits;
    EXPECT_GE(found[1], found[0]) << bits;
    RecordProperty("sqnr_e4m4_" + std::to_string(bits), std::to_string(found[0]));
    RecordProperty("sqnr_f16_" + std::to_string(bits), std::to_string(found[1]));
  }
}

}  // namespace
}  // namespace w4q::formats
