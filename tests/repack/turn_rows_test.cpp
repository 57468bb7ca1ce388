// The words of tiles whose rows take turns, lane by lane, against packing the stacked rows.
#include "repack/turn_rows.h"

#include <gtest/gtest.h>

#include <array>

#include "repack/turned.h"

namespace w4q::repack {
namespace {

using formats::PlaneRole;

constexpr int64_t n = 192, k = 320;

/// What the kernel does with tile by tile: tile t becomes the tiles t + t div across · across and `across` behind.
template <class Lane>
std::vector<uint32_t> turn_words(std::span<const uint32_t> first, std::span<const uint32_t> second, int64_t across) {
  std::vector<uint32_t> both(2 * first.size());
  constexpr size_t tile_words = 128 * Lane::quads;
  for (size_t tile = 0; tile < first.size() / tile_words; ++tile) {
    const auto side_by_side = static_cast<size_t>(across);
    const size_t low_tile = tile + tile / side_by_side * side_by_side;
    for (int lane = 0; lane < 32; ++lane) {
      std::array<uint32_t, 4 * Lane::quads> a{}, b{}, low{}, high{};
      for (size_t i = 0; i < a.size(); ++i) {
        const size_t at = static_cast<size_t>(Lane::quad(static_cast<int>(i / 4), lane)) * 4 + i % 4;
        a[i] = first[tile * tile_words + at];
        b[i] = second[tile * tile_words + at];
      }
      turn_lane<Lane>(a.data(), b.data(), low.data(), high.data());
      for (size_t i = 0; i < a.size(); ++i) {
        const size_t at = static_cast<size_t>(Lane::quad(static_cast<int>(i / 4), lane)) * 4 + i % 4;
        both[low_tile * tile_words + at] = low[i];
        both[(low_tile + side_by_side) * tile_words + at] = high[i];
      }
    }
  }
  return both;
}

using TurnWords = std::vector<uint32_t> (*)(std::span<const uint32_t>, std::span<const uint32_t>, int64_t);

void expect_turned(TurnWords turn, std::string_view layout, std::string_view scheme_name, int64_t across) {
  const auto scheme = formats::parse_scheme(scheme_name);
  const auto a = test::random_planes(scheme, n, k, 1), b = test::random_planes(scheme, n, k, 2);
  const LayoutRow& row = layout_row(layout);
  const auto first = row.pack(a), second = row.pack(b), both = row.pack(test::in_turn(a, b));
  const auto words = [](const formats::PackedWeight& weight) {
    return weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  };
  EXPECT_TRUE(std::ranges::equal(turn(words(first), words(second), across), words(both)))
      << layout << " " << scheme_name;
}

TEST(TurnRows, WordsOfTilesAreThoseOfThePackedStack) {
  constexpr int64_t tiles_of_a_row = k / 64;
  expect_turned(turn_words<FragmentLane<2>>, "kbit-fragment", "kbit2-b32-e4m4", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<3>>, "kbit-fragment", "kbit3-b32-f16", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<4>>, "kbit-fragment", "kbit4-b32-e4m4", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<5>>, "kbit-fragment", "kbit5-b32-e4m4", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<3>>, "rotated-fragment", "rotated3-d128", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<4>>, "float-fragment", "nvfp4", tiles_of_a_row);
  expect_turned(turn_words<FragmentLane<8>>, "float-fragment", "fp8-channel", tiles_of_a_row);
  expect_turned(turn_words<MarlinLane<4>>, "marlin", "int4-g64-f16", 1);
  expect_turned(turn_words<MarlinLane<8>>, "marlin", "int8-row-f16", 1);
}

TEST(TurnRows, RowsComeFromTheirOwnWeights) {
  EXPECT_EQ(turned_from(0), 0);
  EXPECT_FALSE(turned_to_second(7));
  EXPECT_TRUE(turned_to_second(8));
  EXPECT_EQ(turned_from(8), 0);
  EXPECT_EQ(turned_from(16), 8);
  EXPECT_EQ(turned_from(31), 15);
}

}  // namespace
}  // namespace w4q::repack
