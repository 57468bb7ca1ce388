#include <algorithm>
#include <array>

#include "core/parallel.h"
#include "core/with_bits.h"
#include "repack/kbit_fragment_tile.h"
#include "repack/kbit_rows.h"
#include "repack/layout_kbit_fragment.h"
#include "repack/map_pass.h"
#include "repack/rows.h"
#ifdef W4Q_HAVE_CUDA
#include "repack/map_pass_cuda.h"
#endif

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
constexpr int64_t strip_tiles = 8;  ///< side by side along k: a canonical row of them is whole cache lines
constexpr int64_t strip_blocks = strip_tiles * tile_blocks;

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = canonical_planes(scheme, n, k);
  const Map map(n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codes) spec = fragment_codes(scheme.bits, n, k);
    if (spec.role == PlaneRole::scales) spec.shape = {map.row_groups, map.col_groups, 16, 8};
  }
  return specs;
}

constexpr KbitLayout kbit_fragment{layout_name, planes};

/// Up to eight tiles of a row group, and how much of them the weight fills.
struct Strip {
  int64_t first_tile;   ///< of all tiles
  int64_t tiles;        ///< that exist, padding included
  int64_t first_row;    ///< of the weight
  int64_t first_block;  ///< in a row
  int64_t rows;         ///< of the weight, 1 … 64
  int64_t blocks;       ///< of a row, 1 … 16

  bool full() const { return rows == Map::tile_rows && blocks == tiles * tile_blocks; }
};

/// Calls body(strip) for all strips, in parallel.
template <class Body>
void for_each_strip(int64_t n, int64_t k, const Body& body) {
  const Map map(n, k);
  const int64_t row_blocks = formats::kbit_blocks(k);
  const int64_t strips = (map.col_groups + strip_tiles - 1) / strip_tiles;
  parallel_for(map.row_groups * strips, 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row_group = task / strips;
      const int64_t tile = task % strips * strip_tiles;
      body(Strip{.first_tile = row_group * map.col_groups + tile,
                 .tiles = std::min(strip_tiles, map.col_groups - tile),
                 .first_row = row_group * Map::tile_rows,
                 .first_block = tile * tile_blocks,
                 .rows = std::min(Map::tile_rows, n - row_group * Map::tile_rows),
                 .blocks = std::min(strip_blocks, row_blocks - tile * tile_blocks)});
    }
  });
}

/// Calls visit(row in the strip, tile in the strip, block in the tile, canonical block) for the blocks of a strip that
/// the weight has.
template <class Visit>
void for_each_block(const Strip& strip, int64_t row_blocks, const Visit& visit) {
  const auto rows = static_cast<size_t>(strip.rows);
  const auto whole_tiles = static_cast<size_t>(strip.blocks / tile_blocks);
  for (size_t row = 0; row < rows; ++row) {
    int64_t index = (strip.first_row + static_cast<int64_t>(row)) * row_blocks + strip.first_block;
    for (size_t tile = 0; tile < whole_tiles; ++tile, index += tile_blocks) {
      visit(row, tile, size_t{0}, index);
      visit(row, tile, size_t{1}, index + 1);
    }
    if (strip.blocks % tile_blocks != 0) visit(row, whole_tiles, size_t{0}, index);
  }
}

/// Calls visit(row, tile, block in the tile), all in the strip, for the padding.
template <class Visit>
void for_each_padding(const Strip& strip, const Visit& visit) {
  if (strip.full()) return;
  for (int64_t row = 0; row < Map::tile_rows; ++row) {
    for (int64_t b = row < strip.rows ? strip.blocks : 0; b < strip.tiles * tile_blocks; ++b) {
      visit(static_cast<size_t>(row), static_cast<size_t>(b / tile_blocks), static_cast<size_t>(b % tile_blocks));
    }
  }
}

using StripPlanes = std::array<KbitTilePlanes, strip_tiles>;

/// Calls move(word of a tile's planes, canonical word) for every word of a strip that the weight has.
template <int bits, class Move>
void for_each_word(const Strip& strip, int64_t row_blocks, StripPlanes& tiles, const Move& move) {
  for_each_block(strip, row_blocks, [&](size_t row, size_t tile, size_t b, int64_t index) {
    uint32_t* const words = tiles[tile].words.data() + KbitTilePlanes::index(row, b);
    for (int plane = 0; plane < bits; ++plane) {
      move(words[static_cast<size_t>(plane) * KbitTilePlanes::plane_words], index * bits + plane);
    }
  });
}

template <int bits>
void pack_codes(const Strip& strip, int64_t row_blocks, const uint32_t* from, uint32_t* to) {
  StripPlanes tiles;
  if (!strip.full()) tiles = {};
  for_each_word<bits>(strip, row_blocks, tiles, [from](uint32_t& word, int64_t i) { word = from[i]; });
  for (int64_t tile = 0; tile < strip.tiles; ++tile) {
    uint32_t* const words = to + (strip.first_tile + tile) * Map::tile_words(bits);
    pack_kbit_fragment_tile(bits, tiles[static_cast<size_t>(tile)], words);
  }
}

template <int bits, class Refuse>
void unpack_codes(const Strip& strip, int64_t row_blocks, const uint32_t* from, uint32_t* to, const Refuse& refuse) {
  StripPlanes tiles;
  for (int64_t tile = 0; tile < strip.tiles; ++tile) {
    const uint32_t* const words = from + (strip.first_tile + tile) * Map::tile_words(bits);
    unpack_kbit_fragment_tile(bits, words, tiles[static_cast<size_t>(tile)]);
  }
  for_each_padding(strip, [&](size_t row, size_t tile, size_t b) {
    for (size_t plane = 0; plane < bits; ++plane) {
      const size_t word = KbitTilePlanes::index(row, b) + plane * KbitTilePlanes::plane_words;
      if (tiles[tile].words[word] != 0) refuse(PlaneRole::codes, row, tile, b);
    }
  });
  for_each_word<bits>(strip, row_blocks, tiles, [to](uint32_t word, int64_t i) { to[i] = word; });
}

/// Where the scales of a tile stand in it.
using ScalePlaces = std::array<std::array<uint8_t, tile_blocks>, Map::tile_rows>;
constexpr ScalePlaces scale_places = [] {
  ScalePlaces places{};
  const Map map(Map::tile_rows, Map::tile_cols);
  for (int64_t row = 0; row < Map::tile_rows; ++row) {
    for (int64_t b = 0; b < tile_blocks; ++b) {
      places[static_cast<size_t>(row)][static_cast<size_t>(b)] = static_cast<uint8_t>(map.scale(row, b * block));
    }
  }
  return places;
}();

/// The scales of a strip's tiles, packed.
template <class Scale>
struct StripScales {
  Scale* first;

  StripScales(Scale* plane, const Strip& strip) : first(plane + strip.first_tile * Map::tile_scales) {}
  Scale& at(size_t row, size_t tile, size_t b) const {
    return first[tile * size_t{Map::tile_scales} + scale_places[row][b]];
  }
};

template <class Scale>
void pack_scales(const Strip& strip, int64_t row_blocks, const Scale* from, Scale* to) {
  const StripScales<Scale> packed(to, strip);
  for_each_block(strip, row_blocks,
                 [&](size_t row, size_t tile, size_t b, int64_t index) { packed.at(row, tile, b) = from[index]; });
}

template <class Scale, class Refuse>
void unpack_scales(const Strip& strip, int64_t row_blocks, const Scale* from, Scale* to, const Refuse& refuse) {
  const StripScales<const Scale> packed(from, strip);
  for_each_padding(strip, [&](size_t row, size_t tile, size_t b) {
    if (packed.at(row, tile, b) != 0) refuse(PlaneRole::scales, row, tile, b);
  });
  for_each_block(strip, row_blocks,
                 [&](size_t row, size_t tile, size_t b, int64_t index) { to[index] = packed.at(row, tile, b); });
}

/// Calls body.operator()<bits, Scale>() for the width and the type of the scales.
template <class Body>
void with_scheme(const Scheme& scheme, const Body& body) {
  with_table_bits(scheme.bits, [&]<int bits>() {
    if (scheme.scale == formats::ScaleType::e4m4) {
      body.template operator()<bits, uint8_t>();
    } else {
      body.template operator()<bits, uint16_t>();
    }
  });
}

void pack_planes(const PackedWeight& canonical, PackedWeight& packed) {
  const int64_t row_blocks = formats::kbit_blocks(canonical.k);
  const auto from = detail::block_planes(canonical);
  const auto to = detail::block_planes(packed);
  with_scheme(canonical.scheme, [&]<int bits, class Scale>() {
    for_each_strip(canonical.n, canonical.k, [&](const Strip& strip) {
      pack_codes<bits>(strip, row_blocks, reinterpret_cast<const uint32_t*>(from.codes),
                       reinterpret_cast<uint32_t*>(to.codes));
      pack_scales(strip, row_blocks, reinterpret_cast<const Scale*>(from.scales), reinterpret_cast<Scale*>(to.scales));
    });
  });
}

auto padding_refusal(const PackedWeight& packed, std::string_view name, const Strip& strip) {
  return [&packed, name, &strip](PlaneRole role, size_t row, size_t tile, size_t b) {
    detail::refuse_padding(packed, name, role, strip.first_row + static_cast<int64_t>(row),
                           strip.first_block + static_cast<int64_t>(tile * tile_blocks + b));
  };
}

void unpack_planes(const PackedWeight& packed, std::string_view name, PackedWeight& canonical) {
  const int64_t row_blocks = formats::kbit_blocks(packed.k);
  const auto from = detail::block_planes(packed);
  const auto to = detail::block_planes(canonical);
  with_scheme(packed.scheme, [&]<int bits, class Scale>() {
    for_each_strip(packed.n, packed.k, [&](const Strip& strip) {
      const auto refuse = padding_refusal(packed, name, strip);
      unpack_codes<bits>(strip, row_blocks, reinterpret_cast<const uint32_t*>(from.codes),
                         reinterpret_cast<uint32_t*>(to.codes), refuse);
      unpack_scales(strip, row_blocks, reinterpret_cast<const Scale*>(from.scales), reinterpret_cast<Scale*>(to.scales),
                    refuse);
    });
  });
}

PackedWeight pack(const PackedWeight& canonical) { return pack_kbit(kbit_fragment, canonical, pack_planes); }

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  return unpack_kbit(kbit_fragment, packed, name,
                     [name](const PackedWeight& from, PackedWeight& to) { unpack_planes(from, name, to); });
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const Map map(n, k);
  const auto at = map.code_bit(scheme.bits, row, col, bit);
  return {at.word, at.bit, map.scale(row, col)};
}

#ifdef W4Q_HAVE_CUDA
PackedWeight pack_gpu(const PackedWeight& canonical, device::Context& gpu) {
  return pack_on_gpu(layout_name, canonical, gpu);
}
constexpr auto unpack_gpu = unpack_on_gpu;
#else
constexpr decltype(LayoutRow::pack_cuda) pack_gpu = nullptr;
constexpr decltype(LayoutRow::unpack_cuda) unpack_gpu = nullptr;
#endif

}  // namespace

PlaneSpec fragment_codes(int bits, int64_t n, int64_t k) {
  const Map map(n, k);
  return {PlaneRole::codes, DType::i32, {map.row_groups, map.col_groups, bits, Map::lanes, 4}};
}

void pack_fragment_codes(const PackedWeight& canonical, PackedWeight& packed) {
  const auto from = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  with_table_bits(canonical.scheme.bits, [&]<int bits>() {
    for_each_strip(canonical.n, canonical.k, [&](const Strip& strip) {
      pack_codes<bits>(strip, formats::kbit_blocks(canonical.k), from.data(), to.data());
    });
  });
}

void unpack_fragment_codes(const PackedWeight& packed, std::string_view name, PackedWeight& canonical) {
  const auto from = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  with_table_bits(packed.scheme.bits, [&]<int bits>() {
    for_each_strip(packed.n, packed.k, [&](const Strip& strip) {
      unpack_codes<bits>(strip, formats::kbit_blocks(packed.k), from.data(), to.data(),
                         padding_refusal(packed, name, strip));
    });
  });
}

LayoutRow kbit_fragment_row() {
  return {
      .name = layout_name,
      .description = "tiles of 64 × 64 in tensor-core register order for w4q's GPU kernels, zero-padded",
      .reason = "a lane's codes and scales of a tile are 128-bit loads, a byte of its words is an index of two weights",
      .sms = {80, 89, 90},
      .accepts = accepts_kbit,
      .planes = planes,
      .pack = pack,
      .unpack = unpack,
      .place = place,
      .pack_cuda = pack_gpu,
      .unpack_cuda = unpack_gpu};
}

}  // namespace w4q::repack
