// float-fragment as a lane of a kernel sees it, and what it refuses. That it is a layout at all is what the laws say.
#include <gtest/gtest.h>

#include "formats/table/table_format.h"
#include "laws/registries.h"
#include "repack/layout_float_fragment.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using Map = FloatFragmentMap;

constexpr int64_t n = 128, k = 192;

PackedWeight canonical(std::string_view name) {
  return test::encoded(formats::parse_scheme(name), test::sample(test::distributions[1], n, k), n, k);
}

/// Word w of a lane of a tile.
uint32_t lane_word(const PackedWeight& packed, int64_t tile, int lane, int w) {
  const auto at = tile * Map::tile_words(packed.scheme.bits) + w / 4 * 128 + lane * 4 + w % 4;
  return packed.plane(PlaneRole::codes).bytes.as<uint32_t>()[static_cast<size_t>(at)];
}

/// The eight codes of a lane in one half of a row tile and one block of 32.
std::array<uint8_t, 8> lane_codes(const PackedWeight& packed, int64_t tile, int lane, int row_tile, int half,
                                  int block) {
  const int bits = packed.scheme.bits;
  std::array<uint8_t, 8> codes{};
  for (int j = 0; j < 8; ++j) {
    const int step = 2 * block + j / 4, upper = j / 2 % 2;
    // Of 4 bits a byte of word `step` is a pair, of 8 bits half of word 2 · step + upper.
    const uint32_t word = bits == 4 ? lane_word(packed, tile, lane, 4 * row_tile + step)
                                    : lane_word(packed, tile, lane, 8 * row_tile + 2 * step + upper);
    const uint32_t pair = bits == 4 ? word >> (8 * (2 * upper + half)) & 0xFFu : word >> (16 * half) & 0xFFFFu;
    codes[static_cast<size_t>(j)] = static_cast<uint8_t>(pair >> (j % 2 * bits) & ((1u << bits) - 1));
  }
  return codes;
}

TEST(FloatFragment, LanesFindTheirCodesAndScales) {
  for (const char* name : {"nvfp4", "mxfp4", "mxfp8", "fp8-channel", "fp8-block128"}) {
    SCOPED_TRACE(name);
    const PackedWeight weight = canonical(name), packed = layout_row("float-fragment").pack(weight);
    const auto format = formats::scheme_row(weight.scheme.family).table(weight.scheme);
    const bool in_blocks = weight.scheme.block == 16 || weight.scheme.block == 32;
    const Map map(n, k);
    std::vector<uint8_t> expected(static_cast<size_t>(k));
    for (int64_t row = 0; row < n; ++row) {
      formats::table_read_codes(format, weight, row, expected);
      const int row_tile = static_cast<int>(row % 64 / 16), half = static_cast<int>(row / 8 % 2);
      for (int64_t col = 0; col < k; col += 8) {
        const int64_t tile = map.tile(row, col);
        const int lane = static_cast<int>(4 * (row % 8) + col % 32 / 8), block = static_cast<int>(col % 64 / 32);
        const auto codes = lane_codes(packed, tile, lane, row_tile, half, block);
        ASSERT_TRUE(std::ranges::equal(codes, std::span(expected).subspan(static_cast<size_t>(col), 8)))
            << row << " " << col;
        if (!in_blocks) continue;
        // Sixteen bytes of a lane: of four lanes of a row, or of two.
        const int64_t sharers = weight.scheme.block == 32 ? 4 : 2;
        const int64_t at =
            tile * Map::scales_of_tile(weight.scheme.block) + lane / sharers * 16 + 8 * block + 2 * row_tile + half;
        const auto index = static_cast<size_t>(row * (k / weight.scheme.block) + col / weight.scheme.block);
        ASSERT_EQ(packed.plane(PlaneRole::scales).bytes.data()[at], weight.plane(PlaneRole::scales).bytes.data()[index])
            << row << " " << col;
      }
    }
  }
}

TEST(FloatFragment, OtherPlanesStandAsTheyAre) {
  for (const char* name : {"nvfp4-div", "fp8-block128-e8m0", "fp8-tensor"}) {
    const PackedWeight weight = canonical(name), packed = layout_row("float-fragment").pack(weight);
    for (const auto& plane : weight.planes) {
      if (plane.spec.role == PlaneRole::codes) continue;
      if (plane.spec.role == PlaneRole::scales && weight.scheme.block == 16) continue;
      EXPECT_TRUE(same_bytes(packed.plane(plane.spec.role).bytes.bytes(), plane.bytes.bytes())) << name;
    }
  }
}

TEST(FloatFragment, RefusesPaddingThatIsNotZero) {
  for (const char* name : {"nvfp4", "mxfp8"}) {
    const auto scheme = formats::parse_scheme(name);
    const auto& row = layout_row("float-fragment");
    const PackedWeight packed = row.pack(test::encoded(scheme, test::sample(test::distributions[1], 65, 40), 65, 40));
    for (const PlaneRole role : {PlaneRole::codes, PlaneRole::scales}) {
      PackedWeight damaged = packed.clone();
      damaged.plane(role).bytes.bytes().back() = std::byte{1};
      test::expect_error(ErrorCode::bad_file, {"w", to_string(role), "padding"}, [&] { row.unpack(damaged, "w"); });
    }
  }
}

}  // namespace
}  // namespace w4q::repack
