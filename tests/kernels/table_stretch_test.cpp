#include "kernels/common/table_stretch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "formats/codebook.h"

namespace w4q::kernels {
namespace {

/// Root of the mean square of what f16 takes from a table times `factor`, relative to the table.
double rounding(const std::vector<float>& table, float factor) {
  double error = 0, signal = 0;
  for (const float entry : table) {
    const double kept = double{f32_from_f16(f16_from_f32(entry * factor))} / factor;
    error += (kept - entry) * (kept - entry);
    signal += double{entry} * entry;
  }
  return std::sqrt(error / signal);
}

TEST(TableStretch, TablesOfTheNormalDistributionLoseLess) {
  // Measured with these tables; that of the normal distribution with 3 bits is near f16 as it is.
  const double times[][6] = {{0, 0, 100, 20, 2.3, 2.1}, {0, 0, 100, 1, 3, 2.1}};
  for (const bool normal : {false, true}) {
    for (int bits = 2; bits <= 5; ++bits) {
      const auto table = formats::codebook(normal ? "normal" : "nf", bits);
      const float stretch = table_stretch(table);
      EXPECT_GE(stretch, 1);
      EXPECT_LT(stretch, 2);
      const double before = rounding(table, 1), after = rounding(table, stretch);
      EXPECT_LE(after * times[normal][bits], before) << normal << bits << " by " << stretch << ": " << before / after;
      RecordProperty((normal ? "normal" : "nf") + std::to_string(bits), std::to_string(before / after));
    }
  }
}

/// Root of the mean square of what f16 takes from products of a table, rounded, and E4M4's mantissas.
double product_rounding(const std::vector<float>& table, float factor) {
  double error = 0, signal = 0;
  for (const float entry : table) {
    const float held = f32_from_f16(f16_from_f32(entry * factor * 1024));
    for (int m = 16; m < 32; ++m) {
      const float mantissa = static_cast<float>(m) / 16;
      const double lost = double{f32_from_f16(f16_from_f32(held * mantissa))} / 1024 / mantissa / factor - entry;
      error += lost * lost;
      signal += double{entry} * entry;
    }
  }
  return std::sqrt(error / signal);
}

TEST(TableStretch, ProductsWithScalesLoseLess) {
  // Measured with these tables: 4.0, 1.96, 1.28 and 1.13.
  const double times[] = {0, 0, 3.5, 1.9, 1.2, 1.1};
  for (int bits = 2; bits <= 5; ++bits) {
    const auto table = formats::codebook("nf", bits);
    const float stretch = product_stretch(table);
    EXPECT_GE(stretch, 1);
    EXPECT_LT(stretch, 2);
    const double before = product_rounding(table, 1), after = product_rounding(table, stretch);
    EXPECT_LE(after * times[bits], before) << bits << " by " << stretch << ": " << before / after;
    EXPECT_LE(after, product_rounding(table, table_stretch(table))) << bits;
    RecordProperty("nf" + std::to_string(bits), std::to_string(before / after));
  }
}

TEST(TableStretch, PowersOfTwoOfATableChangeNothing) {
  auto table = formats::codebook("nf", 4);
  const float stretch = table_stretch(table), of_products = product_stretch(table);
  for (float& entry : table) entry *= 0x1p-40f;
  EXPECT_EQ(table_stretch(table), stretch);
  EXPECT_EQ(product_stretch(table), of_products);
}

TEST(TableStretch, ExactTablesStayAsTheyAre) {
  EXPECT_EQ(table_stretch(std::vector<float>{-1, -0.25f, 0.5f, 1}), 1);
  EXPECT_EQ(table_stretch(std::vector<float>{0, 0, 0, 0}), 1);
  EXPECT_EQ(product_stretch(std::vector<float>{-1, -0.25f, 0.5f, 1}), 1);
  EXPECT_EQ(product_stretch(std::vector<float>{0, 0, 0, 0}), 1);
}

}  // namespace
}  // namespace w4q::kernels
