// The fast passes of kbit-fragment against the map, over weights of more than one strip.
#include <gtest/gtest.h>

#include "core/parallel.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

const LayoutRow& fragment() { return layout_row("kbit-fragment"); }

/// Random codes and scales, none of them zero; lanes behind k are zero, as in every canonical weight.
PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k) {
  PackedWeight weight = formats::allocate_canonical(scheme, n, k);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (size_t i = 0; i < words.size(); ++i) {
    const int64_t block = static_cast<int64_t>(i) / scheme.bits % formats::kbit_blocks(k);
    words[i] = static_cast<uint32_t>(random_bits(1, i)) & formats::kbit_lane_mask(k, block);
  }
  auto& scales = weight.plane(PlaneRole::scales).bytes;
  for (size_t i = 0; i < scales.size(); ++i) scales.data()[i] = static_cast<std::byte>(1 + random_bits(2, i) % 255);
  return weight;
}

TEST(KbitFragment, PacksAndUnpacksWhatTheMapSays) {
  for (const auto& scheme : formats::scheme_row(formats::SchemeFamily::kbit).schemes()) {
    for (const auto& [n, k] : {std::pair{int64_t{64}, int64_t{512}}, {130, 1100}, {65, 577}, {63, 1024}}) {
      const PackedWeight weight = random_weight(scheme, n, k);
      const PackedWeight packed = fragment().pack(weight);
      EXPECT_TRUE(bytes_equal(packed, pack_by_place(fragment(), weight)))
          << to_string(scheme) << " " << n << " × " << k;
      EXPECT_TRUE(bytes_equal(fragment().unpack(packed, "w"), weight)) << to_string(scheme) << " " << n << " × " << k;
    }
  }
}

TEST(KbitFragment, BytesDoNotDependOnThreads) {
  const PackedWeight weight = random_weight({.bits = 5}, 300, 2100);
  const PackedWeight expected = fragment().pack(weight);
  for (int count : {1, 2, 7}) {
    set_threads(count);
    EXPECT_TRUE(bytes_equal(fragment().pack(weight), expected)) << count;
    EXPECT_TRUE(bytes_equal(fragment().unpack(expected, "w"), weight)) << count;
  }
  set_threads(0);
}

TEST(KbitFragment, NonZeroPaddingIsRefusedByPlace) {
  constexpr int64_t n = 130;  // 3 row groups; rows 130 … 191 are padding
  constexpr int64_t k = 577;  // 19 blocks in a row; block 19 is padding
  for (int bits : {2, 3, 4, 5}) {
    const Scheme scheme{.bits = bits};
    const PackedWeight packed = fragment().pack(random_weight(scheme, n, k));
    for (const auto& [row, block] : {std::pair{130, 0}, {191, 19}, {131, 18}, {129, 19}, {0, 19}}) {
      const auto at = fragment().place(scheme, n, k, row, 32 * block + 31, bits - 1);
      const auto refused = [&](std::string_view role, const auto& damage) {
        PackedWeight damaged = packed.clone();
        damage(damaged);
        test::expect_error(ErrorCode::bad_file, {"layers.0.up", role, concat("row ", row, ", block ", block)},
                           [&] { fragment().unpack(damaged, "layers.0.up"); });
      };
      refused("codes", [&](PackedWeight& weight) {
        weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[static_cast<size_t>(at.word)] |= 1u << at.bit;
      });
      refused("scales",
              [&](PackedWeight& weight) { weight.plane(PlaneRole::scales).bytes.data()[at.scale] = std::byte{0x40}; });
    }
  }
}

}  // namespace
}  // namespace w4q::repack
