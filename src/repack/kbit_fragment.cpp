#include <algorithm>
#include <array>

#include "core/parallel.h"
#include "repack/kbit_rows.h"
#include "repack/layout_kbit_fragment.h"
#include "repack/map_pass.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::PlaneSpec;
using formats::Scheme;
using Map = KbitFragmentMap;

constexpr std::string_view layout_name = "kbit-fragment";
constexpr int64_t block = formats::kbit_block;
constexpr int64_t tile_blocks = Map::tile_cols / block;

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = canonical_planes(scheme, n, k);
  const Map map(n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codes) spec.shape = {map.row_groups, map.col_groups, scheme.bits, Map::lanes, 4};
    if (spec.role == PlaneRole::scales) spec.shape = {map.row_groups, map.col_groups, 16, 8};
  }
  return specs;
}

/// The codes of one tile, a byte each: the step between two orders of bits.
using TileCodes = std::array<std::array<uint8_t, Map::tile_cols>, Map::tile_rows>;

/// Sizes and plane pointers of the two sides of a pass.
struct Sides {
  Map map;
  int bits;
  int64_t n, blocks, scale_bytes;

  explicit Sides(const PackedWeight& weight)
      : map(weight.n, weight.k),
        bits(weight.scheme.bits),
        n(weight.n),
        blocks(formats::kbit_blocks(weight.k)),
        scale_bytes(weight.scheme.scale == formats::ScaleType::e4m4 ? 1 : 2) {}
};

/// Byte i of `spread_bits(b)` is bit i of b.
uint64_t spread_bits(uint32_t byte) noexcept {
  // Eight copies of the byte, one bit kept in each, and that bit moved to the bottom.
  const uint64_t kept = (byte * 0x0101010101010101u) & 0x8040201008040201u;
  return ((kept + 0x00406070787C7E7Fu) >> 7) & 0x0101010101010101u;
}

/// The inverse for bytes that are 0 or 1.
uint32_t gather_bits(uint64_t bytes) noexcept { return static_cast<uint32_t>((bytes * 0x0102040810204080u) >> 56); }

void read_canonical_row(const uint32_t* words, int bits, uint8_t* codes) noexcept {
  for (int64_t group = 0; group < block / 8; ++group) {
    uint64_t eight = 0;
    for (int bit = 0; bit < bits; ++bit) eight |= spread_bits(words[bit] >> (8 * group) & 0xFF) << bit;
    std::memcpy(codes + 8 * group, &eight, sizeof eight);
  }
}

void write_canonical_row(const uint8_t* codes, int bits, uint32_t* words) noexcept {
  for (int bit = 0; bit < bits; ++bit) words[bit] = 0;
  for (int64_t group = 0; group < block / 8; ++group) {
    uint64_t eight = 0;
    std::memcpy(&eight, codes + 8 * group, sizeof eight);
    for (int bit = 0; bit < bits; ++bit) {
      words[bit] |= gather_bits(eight >> bit & 0x0101010101010101u) << (8 * group);
    }
  }
}

/// Row and column of the first code of pair `pair` of a lane and row tile, in their tile.
struct PairPlace {
  int row, col;
};
PairPlace pair_place(int lane, int row_tile, int pair) noexcept {
  const int step = pair / 4;
  const int upper = pair / 2 % 2;
  const int half = pair % 2;
  return {16 * row_tile + 8 * half + lane / 4, 32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * upper};
}

/// The words of one lane and row tile from its 16 pair indices, and back.
void join_pairs(const std::array<uint32_t, Map::pairs>& pairs, int bits, uint32_t* words) noexcept {
  std::fill_n(words, bits, 0u);
  for (int pair = 0; pair < Map::pairs; ++pair) {
    for (int bit = 0; bit < 2 * bits; ++bit) {
      const auto at = Map::pair_bit(bits, pair, bit);
      words[at.word] |= (pairs[static_cast<size_t>(pair)] >> bit & 1u) << at.bit;
    }
  }
}

void split_pairs(const uint32_t* words, int bits, std::array<uint32_t, Map::pairs>& pairs) noexcept {
  pairs.fill(0);
  for (int pair = 0; pair < Map::pairs; ++pair) {
    for (int bit = 0; bit < 2 * bits; ++bit) {
      const auto at = Map::pair_bit(bits, pair, bit);
      pairs[static_cast<size_t>(pair)] |= (words[at.word] >> at.bit & 1u) << bit;
    }
  }
}

/// Calls visit(lane, row_tile, index of the lane's first word of that row tile, in the tile) for all of a tile.
template <class Visit>
void for_each_lane(int bits, const Visit& visit) {
  for (int row_tile = 0; row_tile < Map::row_tiles; ++row_tile) {
    for (int lane = 0; lane < Map::lanes; ++lane) visit(lane, row_tile, row_tile * bits);
  }
}

int64_t word_index(int lane, int w) noexcept { return w / 4 * 128 + lane * 4 + w % 4; }

void pack_codes(const TileCodes& codes, int bits, uint32_t* tile) {
  for_each_lane(bits, [&](int lane, int row_tile, int first) {
    std::array<uint32_t, Map::pairs> pairs{};
    for (int pair = 0; pair < Map::pairs; ++pair) {
      const auto [row, col] = pair_place(lane, row_tile, pair);
      const auto& line = codes[static_cast<size_t>(row)];
      pairs[static_cast<size_t>(pair)] =
          line[static_cast<size_t>(col)] | static_cast<uint32_t>(line[static_cast<size_t>(col + 1)]) << bits;
    }
    uint32_t words[5];
    join_pairs(pairs, bits, words);
    for (int word = 0; word < bits; ++word) tile[word_index(lane, first + word)] = words[word];
  });
}

void unpack_codes(const uint32_t* tile, int bits, TileCodes& codes) {
  for_each_lane(bits, [&](int lane, int row_tile, int first) {
    uint32_t words[5];
    for (int word = 0; word < bits; ++word) words[word] = tile[word_index(lane, first + word)];
    std::array<uint32_t, Map::pairs> pairs{};
    split_pairs(words, bits, pairs);
    for (int pair = 0; pair < Map::pairs; ++pair) {
      const auto [row, col] = pair_place(lane, row_tile, pair);
      auto& line = codes[static_cast<size_t>(row)];
      line[static_cast<size_t>(col)] = static_cast<uint8_t>(pairs[static_cast<size_t>(pair)] & ((1u << bits) - 1));
      line[static_cast<size_t>(col + 1)] = static_cast<uint8_t>(pairs[static_cast<size_t>(pair)] >> bits);
    }
  });
}

/// Calls body(row group, column group, index of the tile) for every tile, in parallel.
template <class Body>
void for_each_tile(const Map& map, const Body& body) {
  parallel_for(map.tiles(), 8, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) body(tile / map.col_groups, tile % map.col_groups, tile);
  });
}

/// Calls visit(row in the tile, block in the tile, canonical block) for the blocks of a tile that exist.
template <class Visit>
void for_each_block(const Sides& sides, int64_t row_group, int64_t col_group, const Visit& visit) {
  const int64_t rows = std::min(Map::tile_rows, sides.n - row_group * Map::tile_rows);
  const int64_t blocks = std::min(tile_blocks, sides.blocks - col_group * tile_blocks);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t b = 0; b < blocks; ++b) {
      visit(row, b, (row_group * Map::tile_rows + row) * sides.blocks + col_group * tile_blocks + b);
    }
  }
}

void copy_scale(std::byte* to, int64_t to_index, const std::byte* from, int64_t from_index, int64_t bytes) noexcept {
  std::memcpy(to + to_index * bytes, from + from_index * bytes, static_cast<size_t>(bytes));
}

PackedWeight pack(const PackedWeight& canonical) {
  const auto& [scheme, layout, n, k, ignored] = canonical;
  check_layout(canonical, formats::canonical_layout, canonical_planes(scheme, n, k), "pack");
  PackedWeight packed = formats::allocate_planes(scheme, layout_name, n, k, planes(scheme, n, k));
  const Sides sides(canonical);
  const auto* words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  const auto* scales = canonical.plane(PlaneRole::scales).bytes.data();
  auto* out_words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  auto* out_scales = packed.plane(PlaneRole::scales).bytes.data();
  for_each_tile(sides.map, [&](int64_t row_group, int64_t col_group, int64_t tile) {
    TileCodes codes{};
    for_each_block(sides, row_group, col_group, [&](int64_t row, int64_t b, int64_t from) {
      read_canonical_row(words + from * sides.bits, sides.bits,
                         &codes[static_cast<size_t>(row)][static_cast<size_t>(b * block)]);
      const int64_t to = tile * Map::tile_scales + sides.map.scale(row, b * block) % Map::tile_scales;
      copy_scale(out_scales, to, scales, from, sides.scale_bytes);
    });
    pack_codes(codes, sides.bits, out_words + tile * Map::tile_words(sides.bits));
  });
  copy_codebook(canonical, packed);
  return packed;
}

/// Throws bad_file when the tile holds anything outside the weight. The unused lanes of a row's last block belong to
/// the canonical planes and are checked with them.
void check_padding(const Sides& sides, int64_t row_group, int64_t col_group, const TileCodes& codes,
                   const std::byte* scales, const PackedWeight& packed, std::string_view name) {
  for (int64_t row = 0; row < Map::tile_rows; ++row) {
    for (int64_t b = 0; b < tile_blocks; ++b) {
      const int64_t weight_row = row_group * Map::tile_rows + row;
      const int64_t weight_block = col_group * tile_blocks + b;
      if (weight_row < sides.n && weight_block < sides.blocks) continue;
      const auto* first = &codes[static_cast<size_t>(row)][static_cast<size_t>(b * block)];
      if (std::any_of(first, first + block, [](uint8_t code) { return code != 0; })) {
        detail::refuse_padding(packed, name, PlaneRole::codes, weight_row, weight_block);
      }
      const auto* scale = scales + sides.map.scale(row, b * block) % Map::tile_scales * sides.scale_bytes;
      if (std::any_of(scale, scale + sides.scale_bytes, [](std::byte byte) { return byte != std::byte{0}; })) {
        detail::refuse_padding(packed, name, PlaneRole::scales, weight_row, weight_block);
      }
    }
  }
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  const auto& [scheme, layout, n, k, ignored] = packed;
  check_layout(packed, layout_name, planes(scheme, n, k), name);
  PackedWeight canonical =
      formats::allocate_planes(scheme, formats::canonical_layout, n, k, canonical_planes(scheme, n, k));
  const Sides sides(packed);
  const auto* words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  const auto* scales = packed.plane(PlaneRole::scales).bytes.data();
  auto* out_words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  auto* out_scales = canonical.plane(PlaneRole::scales).bytes.data();
  for_each_tile(sides.map, [&](int64_t row_group, int64_t col_group, int64_t tile) {
    TileCodes codes;
    unpack_codes(words + tile * Map::tile_words(sides.bits), sides.bits, codes);
    const std::byte* tile_scales = scales + tile * Map::tile_scales * sides.scale_bytes;
    check_padding(sides, row_group, col_group, codes, tile_scales, packed, name);
    for_each_block(sides, row_group, col_group, [&](int64_t row, int64_t b, int64_t to) {
      write_canonical_row(&codes[static_cast<size_t>(row)][static_cast<size_t>(b * block)], sides.bits,
                          out_words + to * sides.bits);
      copy_scale(out_scales, to, tile_scales, sides.map.scale(row, b * block) % Map::tile_scales, sides.scale_bytes);
    });
  });
  copy_codebook(packed, canonical);
  return canonical;
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const Map map(n, k);
  const auto at = map.code_bit(scheme.bits, row, col, bit);
  return {at.word, at.bit, map.scale(row, col)};
}

}  // namespace

LayoutRow kbit_fragment_row() {
  return {.name = layout_name,
          .description = "tiles of 64 × 64 in tensor-core register order for the fast kernels, zero-padded",
          .sms = {80, 89, 90},
          .accepts = accepts_kbit,
          .planes = planes,
          .pack = pack,
          .unpack = unpack,
          .place = place};
}

}  // namespace w4q::repack
