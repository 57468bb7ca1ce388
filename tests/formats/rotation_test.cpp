#include "formats/rotation.h"

#include <bit>
#include <cmath>
#include <numeric>

#include "core/rng.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

std::vector<float> normal_row(int64_t k, uint64_t seed) {
  std::vector<float> row(static_cast<size_t>(k));
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(random_normal(seed, i));
  return row;
}

/// Row i of R as the definition states it, in double: signs of Sylvester's matrix by the parity of i & j.
double entry(const InputRotation& rotation, int64_t i, int64_t j) {
  for (int64_t start = 0, width = 0; start < rotation.k(); start += width) {
    width = rotation_width(rotation.rotation().block, rotation.k(), start);
    if (i < start || i >= start + width) continue;
    if (j < start || j >= start + width) return 0;
    const bool odd = std::popcount(static_cast<uint64_t>((i - start) & (j - start))) % 2 == 1;
    return (odd ? -1.0 : 1.0) * std::copysign(1.0, rotation.factors()[static_cast<size_t>(j)]) /
           std::sqrt(static_cast<double>(width));
  }
  return i == j ? 1 : 0;
}

TEST(Rotation, SignsAreThoseOfTheMersenneTwister) {
  const InputRotation rotation({.block = 16, .seed = 42}, 16);
  const std::string expected = "-+---+---+----+-";
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(rotation.factors()[i], expected[i] == '+' ? 0.25f : -0.25f) << i;
  }
}

/// The golden vector of TurboQuant's project: signs of three seeds, and rows rotated with them in double.
TEST(Rotation, IsTurboQuants) {
  const auto golden = io::Checkpoint::open(test::testdata() / "golden" / "turboquant.safetensors");
  const auto values = [&](const char* name) {
    const Buffer copy = Buffer::copy_of(golden.load(name)->bytes);
    return std::vector<float>(copy.as<float>().begin(), copy.as<float>().end());
  };
  const auto signs = values("signs_seed_42_170_1042"), rotated = values("rotated");
  auto rows = values("in.x");
  const uint64_t seeds[] = {42, 170, 1042};
  for (size_t row = 0; row < 3; ++row) {
    const InputRotation rotation({128, seeds[row]}, 128);
    const std::span<float> x = std::span(rows).subspan(128 * row, 128);
    rotation.rotate(x);
    for (size_t i = 0; i < 128; ++i) {
      EXPECT_EQ(std::copysign(1.0f, rotation.factors()[i]), signs[128 * row + i]);
      EXPECT_NEAR(x[i], rotated[128 * row + i], 1e-6f);
    }
  }
  // The second row's seed is that of the second block of the first.
  const InputRotation both({128, 42}, 256);
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(std::copysign(1.0f, both.factors()[i]), signs[i]);
}

TEST(Rotation, EveryBlockHasTheSeedOfItsFirstInput) {
  const InputRotation whole({.block = 64, .seed = 1000}, 192);
  const InputRotation third({.block = 64, .seed = 1128}, 64);
  EXPECT_TRUE(std::equal(third.factors().begin(), third.factors().end(), whole.factors().begin() + 128));
  // Only the low 32 bits count, and sums beyond 64 bits wrap.
  const InputRotation high({.block = 64, .seed = (uint64_t{7} << 32) + 1000}, 192);
  EXPECT_TRUE(std::ranges::equal(high.factors(), whole.factors()));
}

TEST(Rotation, TailsAreDescendingPowersOfTwo) {
  const auto widths = [](int64_t block, int64_t k) {
    std::vector<int64_t> result;
    for (int64_t start = 0; start < k; start += result.back()) result.push_back(rotation_width(block, k, start));
    return result;
  };
  EXPECT_EQ(widths(128, 256), (std::vector<int64_t>{128, 128}));
  EXPECT_EQ(widths(128, 128 + 64 + 8 + 1), (std::vector<int64_t>{128, 64, 8, 1}));
  EXPECT_EQ(widths(whole_row, 4096), (std::vector<int64_t>{4096}));
  EXPECT_EQ(widths(whole_row, 11008), (std::vector<int64_t>{8192, 2048, 512, 256}));
  EXPECT_EQ(widths(1, 2), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(InputRotation({.block = 128, .seed = 1}, 129).factors().back(), 1.0f);
}

/// fp32 sums of log2(d) stages leave each result within log2(d) · 2^-24 of the norm; 1e-6 is what is asked for.
TEST(Rotation, IsTheDefinedMatrixAndOrthogonal) {
  for (const Rotation& rotation : {Rotation{128, 42}, Rotation{32, 7}, Rotation{whole_row, 1}, Rotation{64, 1042}}) {
    for (int64_t k : {1, 2, 31, 128, 200, 256, 999}) {
      const InputRotation ready(rotation, k);
      const std::vector<float> row = normal_row(k, 5);
      std::vector<float> rotated = row;
      ready.rotate(rotated);
      double norm = 0, rotated_norm = 0;
      for (int64_t i = 0; i < k; ++i) {
        norm += std::pow(double{row[static_cast<size_t>(i)]}, 2);
        rotated_norm += std::pow(double{rotated[static_cast<size_t>(i)]}, 2);
      }
      EXPECT_NEAR(rotated_norm / norm, 1, 1e-6);
      for (int64_t i = 0; i < k; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += entry(ready, i, j) * double{row[static_cast<size_t>(j)]};
        EXPECT_NEAR(rotated[static_cast<size_t>(i)], sum, 1e-6 * std::sqrt(norm)) << to_string(rotation) << " " << k;
      }
      ready.restore(rotated);
      for (int64_t i = 0; i < k; ++i) {
        EXPECT_NEAR(rotated[static_cast<size_t>(i)], row[static_cast<size_t>(i)], 1e-6 * std::sqrt(norm));
      }
    }
  }
}

/// Humming's matrix: the same without signs, whatever the place of a block.
TEST(Rotation, WithoutASeedHasNoSigns) {
  const InputRotation plain({.block = 16, .seed = std::nullopt}, 48 + 8);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(plain.factors()[i], 0.25f);
  EXPECT_NE(Rotation({16, std::nullopt}), Rotation({16, 0}));
  std::vector<float> unit(56);
  unit[16] = 1;
  plain.rotate(unit);
  EXPECT_TRUE(std::all_of(unit.begin() + 16, unit.begin() + 32, [](float value) { return value == 0.25f; }));
}

TEST(Rotation, NoneLeavesARowAlone) {
  const InputRotation none({}, 77);
  const std::vector<float> row = normal_row(77, 1);
  std::vector<float> rotated = row;
  none.rotate(rotated);
  EXPECT_EQ(rotated, row);
  none.restore(rotated);
  EXPECT_EQ(rotated, row);
}

TEST(Rotation, PrintsAndParses) {
  for (const auto& [rotation, text] : {std::pair<Rotation, std::string>{{}, "none"},
                                       {{128, 42}, "hadamard128-s42"},
                                       {{whole_row, 0}, "hadamard-row-s0"},
                                       {{2, ~uint64_t{0}}, "hadamard2-s18446744073709551615"},
                                       {{128, std::nullopt}, "hadamard128-plus"},
                                       {{whole_row, std::nullopt}, "hadamard-row-plus"},
                                       {{max_rotation_block, 1}, "hadamard1048576-s1"}}) {
    EXPECT_EQ(to_string(rotation), text);
    EXPECT_EQ(parse_rotation(text), rotation);
  }
  for (const char* bad :
       {"", "hadamard", "hadamard128", "hadamard128-s", "hadamard128-s-1", "hadamard128-s042", "hadamard100-s1",
        "hadamard1-s1", "hadamard0-s1", "hadamard2097152-s1", "hadamard-s1", "hadamard128-s18446744073709551616",
        "hadamard128-s42 ", "qr128-s42", "hadamard-plus", "hadamard128-s1-plus", "-plus", "-s42", "-row-s1"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown rotation"}, [&] { parse_rotation(bad); });
  }
}

TEST(Rotation, RefusesBlocksThatAreNoPowerOfTwo) {
  for (int64_t block : {int64_t{-1}, int64_t{3}, int64_t{96}, 2 * max_rotation_block}) {
    test::expect_error(ErrorCode::unsupported, {"blocks of"}, [&] { InputRotation({.block = block, .seed = 1}, 64); });
  }
}

}  // namespace
}  // namespace w4q::formats
