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

namespace detail {

/// A plane whose blocks are moved: the bytes of one block on both sides.
struct BlockPlane {
  formats::PlaneRole role;
  int64_t unit;
};
inline constexpr int block_plane_count = 2;
/// Codes and scales of a weight, with what one block takes in each.
void block_planes(const formats::Scheme& scheme, BlockPlane (&planes)[block_plane_count]) noexcept;

/// Throws bad_file: a padding block of `packed` is not zero.
[[noreturn]] void refuse_padding(const formats::PackedWeight& packed, std::string_view name, formats::PlaneRole role,
                                 int64_t row, int64_t block);

/// Calls body(unit) with a compile-time constant for the usual sizes, so that copying a unit is a few plain moves.
template <class Body>
void with_constant_unit(int64_t unit, Body&& body) {
  const auto try_constants = [&]<int64_t... constants>(std::integer_sequence<int64_t, constants...>) {
    return ((unit == constants && (body(std::integral_constant<int64_t, constants>{}), true)) || ...);
  };
  if (!try_constants(std::integer_sequence<int64_t, 1, 2, 8, 12, 16, 20>{})) body(unit);
}

/// Calls copy(canonical block, slot, count) for every run of up to tile_blocks neighbouring blocks, in parallel. A task
/// is a strip of tile_rows rows by a few tiles: its reads and writes stay in the first-level cache.
template <class Map, class Copy>
void for_each_run(const Map& map, int64_t n, int64_t blocks, const Copy& copy) {
  constexpr int64_t strip_blocks = 8 * Map::tile_blocks;
  const int64_t strips = map.rows() / Map::tile_rows;
  const int64_t groups = (blocks + strip_blocks - 1) / strip_blocks;
  const auto task = [&](int64_t index) {
    const int64_t first_row = index / groups * Map::tile_rows;
    const int64_t first_block = index % groups * strip_blocks;
    const int64_t last_block = std::min(first_block + strip_blocks, blocks);
    for (int64_t row = first_row; row < std::min(first_row + Map::tile_rows, n); ++row) {
      for (int64_t block = first_block; block < last_block; block += Map::tile_blocks) {
        copy(row * blocks + block, map.slot(row, block), std::min(Map::tile_blocks, last_block - block));
      }
    }
  };
  parallel_for(strips * groups, 4, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) task(index);
  });
}

/// Copies `count` units; whole tiles are the fast case.
template <class Map, class Unit>
void copy_units(std::byte* to, const std::byte* from, int64_t count, Unit unit) noexcept {
  if (count == Map::tile_blocks) {
    std::memcpy(to, from, static_cast<size_t>(Map::tile_blocks * unit));
  } else {
    std::memcpy(to, from, static_cast<size_t>(count * unit));
  }
}

/// Refuses a block of the padding that is not zero: rows from n on, and blocks behind the last one of a row.
template <class Map>
void check_padding(const Map& map, const formats::PackedWeight& packed, std::string_view name, BlockPlane plane) {
  const std::byte* bytes = packed.plane(plane.role).bytes.data();
  const int64_t blocks = formats::kbit_blocks(packed.k);
  for (int64_t row = 0; row < map.rows(); ++row) {
    for (int64_t block = row < packed.n ? blocks : 0; block < map.blocks(); ++block) {
      const std::byte* unit = bytes + map.slot(row, block) * plane.unit;
      const bool zero = std::all_of(unit, unit + plane.unit, [](std::byte value) { return value == std::byte{0}; });
      if (!zero) refuse_padding(packed, name, plane.role, row, block);
    }
  }
}

}  // namespace detail

/// canonical → `layout`. `specs` are that layout's planes.
template <class Map>
formats::PackedWeight pack_blocks(const Map& map, const formats::PackedWeight& canonical, std::string_view layout,
                                  std::span<const formats::PlaneSpec> specs) {
  formats::PackedWeight packed = formats::allocate_planes(canonical.scheme, layout, canonical.n, canonical.k, specs);
  detail::BlockPlane planes[detail::block_plane_count];
  detail::block_planes(canonical.scheme, planes);
  for (const detail::BlockPlane& plane : planes) {
    const std::byte* from = canonical.plane(plane.role).bytes.data();
    std::byte* to = packed.plane(plane.role).bytes.data();
    detail::with_constant_unit(plane.unit, [&](auto unit) {
      detail::for_each_run(map, canonical.n, formats::kbit_blocks(canonical.k),
                           [=](int64_t block, int64_t slot, int64_t count) {
                             detail::copy_units<Map>(to + slot * unit, from + block * unit, count, unit);
                           });
    });
  }
  return packed;
}

/// `packed` → canonical. `specs` are the canonical planes. Throws bad_file naming `name` when padding is not zero.
template <class Map>
formats::PackedWeight unpack_blocks(const Map& map, const formats::PackedWeight& packed, std::string_view name,
                                    std::span<const formats::PlaneSpec> specs) {
  formats::PackedWeight canonical =
      formats::allocate_planes(packed.scheme, formats::canonical_layout, packed.n, packed.k, specs);
  detail::BlockPlane planes[detail::block_plane_count];
  detail::block_planes(packed.scheme, planes);
  for (const detail::BlockPlane& plane : planes) {
    detail::check_padding(map, packed, name, plane);
    const std::byte* from = packed.plane(plane.role).bytes.data();
    std::byte* to = canonical.plane(plane.role).bytes.data();
    detail::with_constant_unit(plane.unit, [&](auto unit) {
      detail::for_each_run(map, packed.n, formats::kbit_blocks(packed.k),
                           [=](int64_t block, int64_t slot, int64_t count) {
                             detail::copy_units<Map>(to + block * unit, from + slot * unit, count, unit);
                           });
    });
  }
  return canonical;
}

}  // namespace w4q::repack
