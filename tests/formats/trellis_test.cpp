// The trellis family: the code, golden rings, what is refused.
#include "formats/trellis.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/text.h"
#include "formats/trellis_search.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

const SchemeRow& trellis_row() { return scheme_row(SchemeFamily::trellis); }

Scheme trellis(int bits, int window) { return parse_scheme(concat("trellis", bits, "-w", window)); }

/// An independent account: bit by bit from the definition of docs/trellis.md.
int level_of(std::span<const uint32_t> ring, int bits, int window, int weight) {
  const int size = trellis_rows * bits;
  uint32_t value = 0;
  for (int b = (weight + 1) * bits - window; b < (weight + 1) * bits; ++b) {
    const int at = (b + size) % size;
    value = value << 1 | (ring[static_cast<size_t>(at / 32)] >> (31 - at % 32) & 1);
  }
  const uint32_t product = value * 0x83DCD12Du;
  int sum = -510;
  for (int byte = 0; byte < 4; ++byte) sum += static_cast<int>(product >> (8 * byte) & 255);
  return sum;
}

TEST(Trellis, LevelsAreThoseOfTheirSums) {
  int64_t sum = 0, squares = 0;
  int largest = 0;
  for (uint32_t window = 0; window < 1 << 16; ++window) {
    const int64_t level = trellis_level(window);
    sum += level;
    squares += level * level;
    largest = std::max(largest, static_cast<int>(std::abs(level)));
  }
  EXPECT_EQ(sum, -1149);
  EXPECT_EQ(squares, 1431947065);
  EXPECT_EQ(largest, trellis_largest_level);
  EXPECT_NEAR(std::sqrt(static_cast<double>(squares) / (1 << 16)), trellis_level_rms, 0.02);
  constexpr std::pair<uint32_t, int> known[] = {{0, -510}, {1, 95}, {2, -66}, {255, 124}, {4096, -79}, {65535, -96}};
  for (const auto& [window, level] : known) EXPECT_EQ(trellis_level(window), level);
}

struct GoldenRings {
  int bits, window;
  std::vector<uint32_t> words;
  std::vector<int> first;
  double error;
};

/// Rings of the targets 6·((37·p mod 101) − 50), from another implementation.
const std::vector<GoldenRings>& golden_rings() {
  static const std::vector<GoldenRings> rings = {
      {2,
       16,
       {0xbc31fe91, 0x0bf79150, 0x6ae5fac3, 0x800db8f2, 0x46341f0e, 0x8359f06a, 0x239e08be, 0xdaa4ac0a},
       {-224, -100, 142, -200, -36, 137},
       271946},
      {3,
       12,
       {0xc30f67a0, 0x1b865bf9, 0xcec7ba7c, 0x19f6c3d7, 0xbf96fe73, 0xb1ee9f06, 0x7db0f5ef, 0xe5bf9cec, 0x7ba7c19f,
        0x6c3d7b48, 0x9d54cbae, 0x98301608},
       {-271, -128, 130, -242, -31, 222},
       72567},
      {3,
       16,
       {0x9f239540, 0x31ceb494, 0xd33e15da, 0xe05e64e5, 0x69806f9b, 0xc9f21606, 0xe4131233, 0xe8324b54, 0x2b116aaa,
        0x18e9477c, 0x9b0a3074, 0x87b1d757},
       {-313, -50, 173, -210, -50, 176},
       66480},
      {4,
       16,
       {0x3b5870d9, 0x7cb7fec7, 0xc8d873ae, 0x3f8f1087, 0x6876ee84, 0xe008a5b8, 0x86794778, 0xd6e3ec13, 0x8be65e0c,
        0x851e7ef9, 0xa31c725a, 0xc6c367e7, 0x8bb98bc4, 0xcbfd7bc0, 0x0cca6c94, 0x46a5f71d},
       {-294, -84, 144, -235, -36, 199},
       16932}};
  return rings;
}

TrellisColumn golden_column() {
  TrellisColumn column;
  for (int p = 0; p < trellis_rows; ++p) {
    column.targets[static_cast<size_t>(p)] = static_cast<float>(6 * (37 * p % 101 - 50));
    column.counts[static_cast<size_t>(p)] = true;
  }
  return column;
}

TEST(Trellis, RingsAreGolden) {
  const TrellisColumn column = golden_column();
  for (const GoldenRings& golden : golden_rings()) {
    const auto levels = trellis_levels(golden.window);
    TrellisSearch search(golden.bits, golden.window, trellis_plain_step, levels);
    std::vector<uint32_t> ring(golden.words.size());
    trellis_put(search(column), golden.bits, ring);
    EXPECT_EQ(ring, golden.words) << golden.bits << " bits, window " << golden.window;
    double error = 0;
    for (int p = 0; p < trellis_rows; ++p) {
      const int level = trellis_level(trellis_window(golden.words, golden.bits, golden.window, p));
      EXPECT_EQ(level, level_of(golden.words, golden.bits, golden.window, p));
      error += std::pow(static_cast<float>(level) - column.targets[static_cast<size_t>(p)], 2);
      if (static_cast<size_t>(p) >= golden.first.size()) continue;
      EXPECT_EQ(level, golden.first[static_cast<size_t>(p)]);
    }
    EXPECT_EQ(error, golden.error);
  }
}

/// No ring of all that there are has a smaller error than the one found from its own seam, where few weights are left
/// to choose.
TEST(Trellis, SearchFindsTheLeastError) {
  constexpr int bits = 2, window = 8, rows = 6;
  const auto levels = trellis_levels(window);
  TrellisSearch search(bits, window, trellis_plain_step, levels);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    TrellisColumn column{.rows = rows};
    for (size_t p = 0; p < rows; ++p) {
      column.targets[p] = 150 * test::draw_normal(seed, p);
      column.counts[p] = p != seed % 8;
    }
    const auto error_of = [&](const TrellisSymbols& symbols) {
      std::array<uint32_t, 8> ring{};
      trellis_put(symbols, bits, ring);
      float error = 0;
      for (int p = 0; p < rows; ++p) {
        const auto at = static_cast<size_t>(p);
        const float off = static_cast<float>(level_of(ring, bits, window, p)) - column.targets[at];
        if (column.counts[at]) error += off * off;
      }
      return error;
    };
    float least = std::numeric_limits<float>::infinity();
    for (uint32_t all = 0; all < 1u << (bits * rows); ++all) {
      TrellisSymbols symbols{};
      for (size_t p = 0; p < rows; ++p) symbols[p] = all >> (bits * p) & 3;
      least = std::min(least, error_of(symbols));
    }
    EXPECT_EQ(error_of(search(column)), least) << seed;
  }
}

/// Rows that count for more are met better, and no ring that there is leaves less of the sum.
TEST(Trellis, SearchFindsTheLeastWeighedError) {
  constexpr int bits = 2, window = 8, rows = 6;
  const auto levels = trellis_levels(window);
  TrellisSearch search(bits, window, trellis_plain_step, levels);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    TrellisColumn column{.rows = rows, .weighed = true};
    for (size_t p = 0; p < rows; ++p) {
      column.targets[p] = 150 * test::draw_normal(seed, p);
      column.counts[p] = p != seed % 8;
      column.importance[p] = static_cast<float>((p * 5 + seed) % 7) + 0.01f;
    }
    const auto error_of = [&](const TrellisSymbols& symbols) {
      std::array<uint32_t, 8> ring{};
      trellis_put(symbols, bits, ring);
      double error = 0;
      for (int p = 0; p < rows; ++p) {
        const auto at = static_cast<size_t>(p);
        const double off = level_of(ring, bits, window, p) - double{column.targets[at]};
        if (column.counts[at]) error += double{column.importance[at]} * off * off;
      }
      return error;
    };
    double least = std::numeric_limits<double>::infinity();
    for (uint32_t all = 0; all < 1u << (bits * rows); ++all) {
      TrellisSymbols symbols{};
      for (size_t p = 0; p < rows; ++p) symbols[p] = all >> (bits * p) & 3;
      least = std::min(least, error_of(symbols));
    }
    EXPECT_LE(error_of(search(column)), least * (1 + 1e-5)) << seed;  // costs are fp32
  }
}

TEST(Trellis, RowsThatCountAlikeAreAsIfNotWeighed) {
  TrellisColumn column = golden_column();
  const auto levels = trellis_levels(10);
  TrellisSearch search(3, 10, trellis_plain_step, levels);
  const auto plain = search(column);
  column.weighed = true;
  EXPECT_EQ(search(column), plain);  // nothing counts
  column.importance.fill(0.3f);
  EXPECT_EQ(search(column), plain);
}

/// Towards other targets, from any row on: the state in front of it stays, and the ring that stood is no better.
TEST(Trellis, AnotherSearchFindsNoWorseRing) {
  constexpr int bits = 3, window = 10;
  const auto levels = trellis_levels(window);
  TrellisSearch search(bits, window, trellis_plain_step, levels);
  TrellisColumn column = golden_column();
  std::array<uint32_t, 12> before{}, after{};
  trellis_put(search(column), bits, before);
  for (float& target : column.targets) target = 0.9f * target + 20;
  column.weighed = true;
  for (size_t p = 0; p < trellis_rows; ++p) column.importance[p] = static_cast<float>(p % 5 + 1);
  const auto error_of = [&](std::span<const uint32_t> ring) {
    double error = 0;
    for (int p = 0; p < trellis_rows; ++p) {
      const auto at = static_cast<size_t>(p);
      const double off = level_of(ring, bits, window, p) - double{column.targets[at]};
      error += double{column.importance[at]} * off * off;
    }
    return error;
  };
  for (const int seam : {0, 1, 64, 127}) {
    const int last = (seam + 127) % 128;
    const uint32_t state = trellis_window(before, bits, window, last);
    trellis_put(search(column, seam, state), bits, after);
    EXPECT_EQ(trellis_window(after, bits, window, last), state) << seam;
    EXPECT_LT(error_of(after), 0.8 * error_of(before)) << seam << " " << error_of(after) / error_of(before);
  }
}

/// SQNR of N(0, 1) in rows of 256, in dB: measured 16.91 with 3 bits and a window of 10 for rings of 256
/// (docs/trellis.md), of which rings of 128 and a scale of each row may take a tenth.
TEST(Trellis, NormalWeightsKeepTheirSignal) {
  constexpr std::pair<const char*, double> known[] = {
      {"trellis2-w8", 10.75}, {"trellis2-w10", 11.11}, {"trellis3-w10", 16.91}, {"trellis4-w10", 22.65}};
  for (const auto& [name, sqnr] : known) {
    const auto values = test::sample(test::distributions[0], 256, 256);
    const auto weight = trellis_row().encode(parse_scheme(name), values, 256, 256, {});
    EXPECT_NEAR(test::sqnr(values, test::decode(weight)), sqnr, 0.15) << name;
  }
}

TEST(Trellis, BitsPerWeight) {
  EXPECT_DOUBLE_EQ(trellis_row().bits_per_weight(trellis(3, 16), 4096, 4096), 3 + 16.0 / 4096 + 32.0 / (4096.0 * 4096));
  EXPECT_DOUBLE_EQ(trellis_row().bits_per_weight(trellis(2, 12), 192, 256),
                   2 * 256.0 / 192 + 16.0 / 256 + 32.0 / (192.0 * 256));
}

TEST(Trellis, NamesOfSchemes) {
  EXPECT_EQ(to_string(parse_scheme("trellis3")), "trellis3-w14");
  EXPECT_EQ(trellis(4, 16).window, 16);
  for (const char* name :
       {"trellis5-w12", "trellis3-w7", "trellis3-w17", "trellis3-w012", "trellis-w12", "trellis3-"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown scheme", "trellis<2 to 4>"}, [&] { parse_scheme(name); });
  }
}

/// Rows far from one another keep their scales in the normal range of f16 where a power of two can bring them there.
TEST(Trellis, TheUnitFollowsTheRangeOfRows) {
  for (const float size : {1.0f, 1e-9f, 1e9f, 1e-30f, 1e30f}) {
    auto values = test::sample(test::distributions[0], 130, 40);
    for (float& value : values) value *= size;
    const auto weight = trellis_row().encode(trellis(3, 10), values, 130, 40, {});
    EXPECT_GT(test::sqnr(values, test::decode(weight)), 15) << size;
    const float unit = weight.plane(PlaneRole::codebook).bytes.as<float>()[0];
    EXPECT_EQ(size == 1.0f, unit == 0x1p-7f) << size;
  }
}

TEST(Trellis, DamagedPlanesAreRefusedByName) {
  const auto values = test::sample(test::distributions[0], 130, 5);
  const auto sound = trellis_row().encode(trellis(3, 8), values, 130, 5, {});
  const auto refuse = [&](std::string_view plane, std::string_view what, const auto& damage) {
    PackedWeight weight = sound.clone();
    damage(weight);
    test::expect_error(ErrorCode::bad_file, {"layer.x", plane, what},
                       [&] { trellis_row().validate(weight, "layer.x"); });
  };
  const auto scales = [](PackedWeight& w) { return w.plane(PlaneRole::scales).bytes.as<uint16_t>(); };
  const auto unit = [](PackedWeight& w) { return w.plane(PlaneRole::codebook).bytes.as<float>(); };
  refuse("scales", "negative value\n  row 7", [&](PackedWeight& w) { scales(w)[7] |= 0x8000; });
  refuse("scales", "non-finite value\n  row 8", [&](PackedWeight& w) { scales(w)[8] = 0x7C00; });
  refuse("scales", "too large\n  row 9", [&](PackedWeight& w) { unit(w)[0] = 0x1p110f, scales(w)[9] = 0x7BFF; });
  refuse("codebook", "power of two", [&](PackedWeight& w) { unit(w)[0] = 0.75f; });
  refuse("codebook", "power of two", [&](PackedWeight& w) { unit(w)[0] = -0.5f; });
  refuse("codebook", "power of two", [&](PackedWeight& w) { unit(w)[0] = 0x1p120f; });
  refuse("codes", "strip 1, column 3", [&](PackedWeight& w) { trellis_ring(w, 1, 3)[0] |= 1; });
  refuse("codes", "strip 1, column 0", [&](PackedWeight& w) { trellis_ring(w, 1, 0)[11] |= 1u << 31; });
  refuse("trellis3-w20", "no such scheme", [&](PackedWeight& w) { w.scheme.window = 20; });
}

}  // namespace
}  // namespace w4q::formats
