#include <gtest/gtest.h>

#include <algorithm>

#include "core/parallel.h"
#include "formats/codebook.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "quantize/quantizer_registry.h"
#include "repack/layout_kbit_tile.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

PackedWeight canonical(int64_t n, int64_t k, int bits = 3, ScaleType scale = ScaleType::e4m4) {
  const Scheme scheme{formats::SchemeFamily::kbit, bits, 32, scale};
  return formats::scheme_row(scheme.family)
      .encode(scheme, test::sample(test::distributions[0], n, k), n, k, formats::codebook("nf", bits));
}

const LayoutRow& tile() { return layout_row("kbit-tile"); }

class Golden : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Bits, Golden, testing::Values(2, 3, 4, 5));

TEST_P(Golden, TiledBytesAreThePeers) {
  const auto golden =
      io::Checkpoint::open(test::testdata() / "golden" / ("bnb_kbit_k" + std::to_string(GetParam()) + ".safetensors"));
  const auto input = golden.load("in.weight");
  quantize::QuantizeOptions options;
  options.bnb_compatible = true;
  const Scheme scheme{formats::SchemeFamily::kbit, GetParam(), 32, ScaleType::e4m4};
  const PackedWeight weight = quantize::quantizer_row("kbit").run(input.view(), scheme, options).weight;
  const PackedWeight packed = tile().pack(weight);
  EXPECT_TRUE(std::ranges::equal(packed.plane(PlaneRole::codes).bytes.bytes(), golden.load("packed_tiled")->bytes));
  EXPECT_TRUE(std::ranges::equal(packed.plane(PlaneRole::scales).bytes.bytes(), golden.load("absmax_tiled")->bytes));
  EXPECT_TRUE(bytes_equal(tile().unpack(packed, "w"), weight));
}

TEST(KbitTile, ShapesCountPaddedTiles) {
  const PackedWeight packed = tile().pack(canonical(130, 65));
  EXPECT_EQ(packed.plane(PlaneRole::codes).spec.shape, (Shape{2, 2, 128, 2, 3}));
  EXPECT_EQ(packed.plane(PlaneRole::scales).spec.shape, (Shape{2, 2, 128, 2}));
  EXPECT_EQ(packed.n, 130);
  EXPECT_EQ(packed.k, 65);
  EXPECT_EQ(packed.layout, "kbit-tile");
}

TEST(KbitTile, SlotsFollowTheFormula) {
  const KbitTileMap map(300, 200);  // 3 × 4 tiles
  EXPECT_EQ(map.slot(0, 0), 0);
  EXPECT_EQ(map.slot(0, 1), 1);
  EXPECT_EQ(map.slot(1, 0), 2);
  EXPECT_EQ(map.slot(127, 1), 255);
  EXPECT_EQ(map.slot(128, 0), 256);
  EXPECT_EQ(map.slot(0, 2), 3 * 256);
  EXPECT_EQ(map.slot(299, 6), (3 * 3 + 2) * 256 + 2 * 43);
}

TEST(KbitTile, BytesDoNotDependOnThreads) {
  const PackedWeight weight = canonical(700, 2100, 2);
  const PackedWeight expected = tile().pack(weight);
  for (int count : {1, 2, 3, 7}) {
    set_threads(count);
    const PackedWeight packed = tile().pack(weight);
    EXPECT_TRUE(bytes_equal(packed, expected)) << count;
    EXPECT_TRUE(bytes_equal(tile().unpack(packed, "w"), weight)) << count;
  }
  set_threads(0);
}

TEST(KbitTile, NonZeroPaddingIsRefusedByPlace) {
  const PackedWeight weight = canonical(130, 65, 3);  // 3 blocks in a row; rows 130 … 255 and block 3 are padding
  const KbitTileMap map(130, 65);
  const auto refused = [&](PlaneRole role, int64_t byte, std::initializer_list<std::string_view> parts) {
    PackedWeight packed = tile().pack(weight);
    packed.plane(role).bytes.data()[byte] = std::byte{0x40};
    test::expect_error(ErrorCode::bad_file, parts, [&] { tile().unpack(packed, "layers.0.up"); });
  };
  refused(PlaneRole::codes, map.slot(131, 2) * 12 + 11, {"layers.0.up", "codes", "kbit-tile", "row 131, block 2"});
  refused(PlaneRole::codes, map.slot(0, 3) * 12, {"row 0, block 3", "130 rows of 3 blocks"});
  refused(PlaneRole::scales, map.slot(255, 0), {"scales", "row 255, block 0"});
}

TEST(KbitTile, OtherPlanesOrLayoutsAreRefused) {
  PackedWeight packed = tile().pack(canonical(64, 64));
  packed.plane(PlaneRole::codes).spec.shape = {1, 1, 128, 6};
  test::expect_error(ErrorCode::bad_file, {"up", "[1, 1, 128, 2, 3]", "[1, 1, 128, 6]"},
                     [&] { tile().unpack(packed, "up"); });
  packed = tile().pack(canonical(64, 64));
  packed.n = 129;
  test::expect_error(ErrorCode::bad_file, {"[1, 2, 128, 2, 3]"}, [&] { tile().unpack(packed, "up"); });
  test::expect_error(ErrorCode::bad_file, {"another layout", "kbit-tile", "canonical"},
                     [&] { tile().unpack(canonical(64, 64), "up"); });
  test::expect_error(ErrorCode::bad_file, {"another layout"}, [&] { tile().pack(tile().pack(canonical(64, 64))); });
}

TEST(KbitTile, SubnormalScalesPassThrough) {
  PackedWeight weight = canonical(4, 64);
  weight.plane(PlaneRole::scales).bytes.as<uint8_t>()[3] = 0x07;
  EXPECT_TRUE(bytes_equal(tile().unpack(tile().pack(weight), "w"), weight));
}

}  // namespace
}  // namespace w4q::repack
