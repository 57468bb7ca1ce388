// The passes that move bits between the canonical layout and another one, driven by the layout's map.
//
// pack_by_place() and unpack_by_place() serve every layout, a bit at a time, through LayoutRow::place: they are the
// definition. pack_blocks() and unpack_blocks() are the fast passes of layouts that move whole blocks (the words of 32
// codes, and their scale); they are given a map with
//
//   rows(), blocks()        the size with padding, in rows and in blocks along k
//   tile_rows, tile_blocks  rows × blocks that stand together: parallel work and cache blocking follow them
//   slot(row, block)        where a block stands, counted in blocks; the tile_blocks blocks of a row are neighbours
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/parallel.h"
#include "formats/kbit.h"
#include "formats/packed.h"
#include "repack/layout_registry.h"

namespace w4q::repack {

formats::PackedWeight pack_by_place(const LayoutRow& row, const formats::PackedWeight& canonical);
/// Does not look at padding.
formats::PackedWeight unpack_by_place(const LayoutRow& row, const formats::PackedWeight& packed);

/// Throws bad_file naming `name` unless `weight` stands in `layout` and has exactly that layout's planes.
void check_layout(const formats::PackedWeight& weight, std::string_view layout,
                  std::span<const formats::PlaneSpec> specs, std::string_view name);

/// LayoutRow::accepts of layouts that take any size of the schemes they are made for. `holds`: "rotated schemes".
bool accepts_any_size(bool scheme_fits, std::string_view holds, int64_t n, int64_t k, std::string* why);
/// The canonical planes of what `accepts` takes, for a layout to arrange. Throws unsupported for anything else.
std::vector<formats::PlaneSpec> accepted_planes(std::string_view layout, decltype(LayoutRow::accepts) accepts,
                                                const formats::Scheme& scheme, int64_t n, int64_t k);

namespace detail {

/// Throws bad_file: a padding block of `packed` is not zero.
[[noreturn]] void refuse_padding(const formats::PackedWeight& packed, std::string_view name, formats::PlaneRole role,
                                 int64_t row, int64_t block);

/// Bytes of one block in the codes plane and in the scales plane.
inline int64_t code_bytes(const formats::Scheme& scheme) noexcept { return int64_t{4} * scheme.bits; }
inline int64_t scale_bytes(const formats::Scheme& scheme) noexcept {
  return scheme.scale == formats::ScaleType::e4m4 ? 1 : 2;
}

/// The planes that a pass reads or writes.
template <class Byte>
struct BlockPlanes {
  Byte* codes;
  Byte* scales;
};

template <class Weight>
auto block_planes(Weight& weight) {
  auto* codes = weight.plane(formats::PlaneRole::codes).bytes.data();
  return BlockPlanes<std::remove_pointer_t<decltype(codes)>>{codes,
                                                             weight.plane(formats::PlaneRole::scales).bytes.data()};
}

/// Calls body with the two sizes as constants where they are usual, so that copying a block is a few plain moves.
template <class Body>
void with_block_sizes(const formats::Scheme& scheme, const Body& body) {
  const auto with_scale = [&](auto code) {
    if (scheme.scale == formats::ScaleType::e4m4) {
      body(code, std::integral_constant<int64_t, 1>{});
    } else {
      body(code, std::integral_constant<int64_t, 2>{});
    }
  };
  const int64_t bytes = code_bytes(scheme);
  const auto try_sizes = [&]<int64_t... sizes>(std::integer_sequence<int64_t, sizes...>) {
    return ((bytes == sizes && (with_scale(std::integral_constant<int64_t, sizes>{}), true)) || ...);
  };
  if (!try_sizes(std::integer_sequence<int64_t, 8, 12, 16, 20>{})) with_scale(bytes);
}

/// Calls copy(canonical block, slot, blocks) for every run of up to tile_blocks neighbouring blocks, in parallel. A
/// task is a strip of tile_rows rows by a few tiles: its reads and writes stay in the first-level cache. `blocks` is a
/// constant for whole runs.
template <class Map, class Copy>
void for_each_run(const Map& map, int64_t n, int64_t blocks, const Copy& copy) {
  constexpr int64_t strip_tiles = 8;
  constexpr std::integral_constant<int64_t, Map::tile_blocks> whole;
  const int64_t tiles = blocks / whole;
  const int64_t groups = (map.blocks() / whole + strip_tiles - 1) / strip_tiles;
  const auto move_strip = [&](int64_t strip, int64_t group) {
    const int64_t last_tile = std::min((group + 1) * strip_tiles, tiles);
    const bool ragged = group + 1 == groups && blocks % whole != 0;
    for (int64_t row = strip * Map::tile_rows; row < std::min((strip + 1) * Map::tile_rows, n); ++row) {
      for (int64_t tile = group * strip_tiles; tile < last_tile; ++tile) {
        copy(row * blocks + tile * whole, map.slot(row, tile * whole), whole);
      }
      if (ragged) copy(row * blocks + tiles * whole, map.slot(row, tiles * whole), blocks % whole);
    }
  };
  parallel_for(map.rows() / Map::tile_rows * groups, 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) move_strip(task / groups, task % groups);
  });
}

/// Refuses a block of the padding that is not zero: rows from n on, and blocks behind the last one of a row.
template <class Map>
void check_padding(const Map& map, const formats::PackedWeight& packed, std::string_view name, formats::PlaneRole role,
                   int64_t bytes) {
  const std::byte* const plane = packed.plane(role).bytes.data();
  const int64_t blocks = formats::kbit_blocks(packed.k);
  for (int64_t row = 0; row < map.rows(); ++row) {
    for (int64_t block = row < packed.n ? blocks : 0; block < map.blocks(); ++block) {
      const std::byte* begin = plane + map.slot(row, block) * bytes;
      const bool zero = std::all_of(begin, begin + bytes, [](std::byte value) { return value == std::byte{0}; });
      if (!zero) refuse_padding(packed, name, role, row, block);
    }
  }
}

inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) noexcept {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace detail

/// Moves the codes and scales of `canonical` into those of `packed`, the same weight in another layout, whose padding
/// is zero already.
template <class Map>
void pack_blocks(const Map& map, const formats::PackedWeight& canonical, formats::PackedWeight& packed) {
  const auto from = detail::block_planes(canonical);
  const auto to = detail::block_planes(packed);
  detail::with_block_sizes(canonical.scheme, [&](auto code, auto scale) {
    detail::for_each_run(map, canonical.n, formats::kbit_blocks(canonical.k),
                         [=](int64_t block, int64_t slot, auto count) {
                           detail::copy_bytes(to.codes + slot * code, from.codes + block * code, count * code);
                           detail::copy_bytes(to.scales + slot * scale, from.scales + block * scale, count * scale);
                         });
  });
}

/// The way back. Throws bad_file naming `name` when padding is not zero.
template <class Map>
void unpack_blocks(const Map& map, const formats::PackedWeight& packed, std::string_view name,
                   formats::PackedWeight& canonical) {
  detail::check_padding(map, packed, name, formats::PlaneRole::codes, detail::code_bytes(packed.scheme));
  detail::check_padding(map, packed, name, formats::PlaneRole::scales, detail::scale_bytes(packed.scheme));
  const auto from = detail::block_planes(packed);
  const auto to = detail::block_planes(canonical);
  detail::with_block_sizes(packed.scheme, [&](auto code, auto scale) {
    detail::for_each_run(map, packed.n, formats::kbit_blocks(packed.k), [=](int64_t block, int64_t slot, auto count) {
      detail::copy_bytes(to.codes + block * code, from.codes + slot * code, count * code);
      detail::copy_bytes(to.scales + block * scale, from.scales + slot * scale, count * scale);
    });
  });
}

}  // namespace w4q::repack
