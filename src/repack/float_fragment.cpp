#include <algorithm>
#include <array>
#include <cstring>

#include "core/parallel.h"
#include "formats/table/table_format.h"
#include "repack/kbit_rows.h"
#include "repack/layout_float_fragment.h"
#include "repack/map_pass.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::Plane;
using formats::PlaneRole;
using formats::PlaneSpec;
using formats::Scheme;
using Map = FloatFragmentMap;

constexpr std::string_view layout_name = "float-fragment";
constexpr int64_t tile = Map::tile_cols;
constexpr int64_t tile_bytes = Map::tile_rows * Map::tile_cols;  // of codes of 8 bits

/// Whether its scales are those of blocks along k, which stand beside their lanes.
bool has_blocks(const Scheme& scheme) noexcept {
  return scheme.scale == formats::ScaleType::e4m3 || (scheme.scale == formats::ScaleType::e8m0 && scheme.block == 32);
}

bool accepts(const Scheme& scheme, int64_t n, int64_t k, std::string* why) {
  return accepts_any_size(scheme.family == formats::SchemeFamily::small_float, "small floats", n, k, why);
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = accepted_planes(layout_name, accepts, scheme, n, k);
  const Map map(n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codes) spec = fragment_codes(scheme.bits, n, k);
    if (spec.role != PlaneRole::scales || !has_blocks(scheme)) continue;
    spec.shape = {map.row_groups, map.col_groups, 16, Map::scales_of_tile(scheme.block) / 16};
  }
  return specs;
}

/// Where the bytes of codes stand in a tile, by row and column.
using BytePlaces = std::array<std::array<uint16_t, tile>, Map::tile_rows>;
constexpr BytePlaces byte_places = [] {
  BytePlaces places{};
  const Map map(Map::tile_rows, tile);
  for (int64_t row = 0; row < Map::tile_rows; ++row) {
    for (int64_t col = 0; col < tile; ++col) {
      const auto at = map.code_bit(8, row, col, 0);
      places[static_cast<size_t>(row)][static_cast<size_t>(col)] = static_cast<uint16_t>(4 * at.word + at.bit / 8);
    }
  }
  return places;
}();

/// Calls move(byte of the codes plane, column) for a row of so many columns.
template <class Move>
void for_each_byte(const Map& map, int64_t row, int64_t columns, const Move& move) {
  const auto& places = byte_places[static_cast<size_t>(row % Map::tile_rows)];
  for (int64_t first = 0; first < columns; first += tile) {
    const int64_t base = map.tile(row, first) * tile_bytes, count = std::min(tile, columns - first);
    for (int64_t col = 0; col < count; ++col) move(base + places[static_cast<size_t>(col)], first + col);
  }
}

/// Rows of a task: whole tiles of so many weights that threads are worth waking.
int64_t task_rows(int64_t k) noexcept {
  constexpr int64_t least = int64_t{1} << 16;
  return Map::tile_rows * std::max<int64_t>(1, least / (Map::tile_rows * k));
}

/// Calls body(row, codes of its own) for all rows, in parallel.
template <class Body>
void for_each_row(const PackedWeight& weight, const Body& body) {
  parallel_for(weight.n, task_rows(weight.k), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(weight.k));
    for (int64_t row = begin; row < end; ++row) body(row, codes);
  });
}

void pack_codes(const PackedWeight& canonical, PackedWeight& packed) {
  if (canonical.scheme.bits == 4) return pack_fragment_codes(canonical, packed);
  const auto format = formats::scheme_row(canonical.scheme.family).table(canonical.scheme);
  auto* const to = packed.plane(PlaneRole::codes).bytes.data();
  for_each_row(canonical, [&](int64_t row, std::vector<uint8_t>& codes) {
    formats::table_read_codes(format, canonical, row, codes);
    for_each_byte({canonical.n, canonical.k}, row, canonical.k,
                  [&](int64_t at, int64_t col) { to[at] = static_cast<std::byte>(codes[static_cast<size_t>(col)]); });
  });
}

/// Throws bad_file unless the bytes that stand for no weight are zero.
void check_code_padding(const PackedWeight& packed, std::string_view name) {
  const Map map(packed.n, packed.k);
  const auto* const from = packed.plane(PlaneRole::codes).bytes.data();
  for (int64_t row = 0; row < map.row_groups * Map::tile_rows; ++row) {
    const int64_t present = row < packed.n ? packed.k : 0;
    if (present == map.col_groups * tile) continue;
    for_each_byte(map, row, map.col_groups * tile, [&](int64_t at, int64_t col) {
      if (col >= present && from[at] != std::byte{0}) {
        detail::refuse_padding(packed, name, PlaneRole::codes, row, col / formats::kbit_block);
      }
    });
  }
}

void unpack_codes(const PackedWeight& packed, std::string_view name, PackedWeight& canonical) {
  if (packed.scheme.bits == 4) return unpack_fragment_codes(packed, name, canonical);
  check_code_padding(packed, name);
  const auto format = formats::scheme_row(packed.scheme.family).table(packed.scheme);
  const auto* const from = packed.plane(PlaneRole::codes).bytes.data();
  for_each_row(canonical, [&](int64_t row, std::vector<uint8_t>& codes) {
    for_each_byte({packed.n, packed.k}, row, packed.k,
                  [&](int64_t at, int64_t col) { codes[static_cast<size_t>(col)] = static_cast<uint8_t>(from[at]); });
    formats::table_write_codes(format, canonical, row, codes);
  });
}

/// Calls move(canonical scale, scale of the layout) for the blocks of all rows.
template <class Move>
void for_each_scale(const PackedWeight& weight, const Move& move) {
  const Map map(weight.n, weight.k);
  const int block = weight.scheme.block;
  const int64_t blocks = (weight.k + block - 1) / block;
  parallel_for(weight.n, task_rows(weight.k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t b = 0; b < blocks; ++b) move(row * blocks + b, map.block_scale(block, row, b * block));
    }
  });
}

void check_scale_padding(const PackedWeight& packed, std::string_view name) {
  const Map map(packed.n, packed.k);
  const auto* const scales = packed.plane(PlaneRole::scales).bytes.data();
  const int block = packed.scheme.block;
  const int64_t blocks = (packed.k + block - 1) / block, padded = map.col_groups * tile / block;
  for (int64_t row = 0; row < map.row_groups * Map::tile_rows; ++row) {
    for (int64_t b = row < packed.n ? blocks : 0; b < padded; ++b) {
      if (scales[map.block_scale(block, row, b * block)] == std::byte{0}) continue;
      detail::refuse_padding(packed, name, PlaneRole::scales, row, b);
    }
  }
}

void copy_plane(const PackedWeight& from, PackedWeight& to, PlaneRole role) {
  to.plane(role).bytes = from.plane(role).bytes.clone();
}

/// All but codes, and scales of blocks.
void copy_other_planes(const PackedWeight& from, PackedWeight& to) {
  for (const Plane& plane : from.planes) {
    const PlaneRole role = plane.spec.role;
    const bool moves = role == PlaneRole::codes || (role == PlaneRole::scales && has_blocks(from.scheme));
    if (!moves) copy_plane(from, to, role);
  }
}

PackedWeight pack(const PackedWeight& canonical) {
  const auto& [scheme, layout, n, k, ignored] = canonical;
  const auto specs = planes(scheme, n, k);
  check_layout(canonical, formats::canonical_layout, formats::scheme_row(scheme.family).planes(scheme, n, k), "pack");
  PackedWeight packed = formats::allocate_planes(scheme, layout_name, n, k, specs);
  pack_codes(canonical, packed);
  copy_other_planes(canonical, packed);
  if (!has_blocks(scheme)) return packed;
  const auto* const from = canonical.plane(PlaneRole::scales).bytes.data();
  auto* const to = packed.plane(PlaneRole::scales).bytes.data();
  for_each_scale(canonical, [&](int64_t at, int64_t place) { to[place] = from[at]; });
  return packed;
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  const auto& [scheme, layout, n, k, ignored] = packed;
  check_layout(packed, layout_name, planes(scheme, n, k), name);
  PackedWeight canonical = formats::allocate_canonical(scheme, n, k);
  unpack_codes(packed, name, canonical);
  copy_other_planes(packed, canonical);
  if (!has_blocks(scheme)) return canonical;
  check_scale_padding(packed, name);
  const auto* const from = packed.plane(PlaneRole::scales).bytes.data();
  auto* const to = canonical.plane(PlaneRole::scales).bytes.data();
  for_each_scale(canonical, [&](int64_t at, int64_t place) { to[at] = from[place]; });
  return canonical;
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const Map map(n, k);
  const auto at = map.code_bit(scheme.bits, row, col, bit);
  const int64_t scale = has_blocks(scheme)
                            ? map.block_scale(scheme.block, row, col)
                            : formats::scheme_row(scheme.family).place(scheme, n, k, row, col, bit).scale;
  return {at.word, at.bit, scale};
}

}  // namespace

LayoutRow float_fragment_row() {
  return {
      .name = layout_name,
      .description =
          "codes as in kbit-fragment, of 4 or 8 bits, block scales beside their lanes, for w4q's kernels of "
          "small floats",
      .reason = "what the GPU reads; a lane's sixteen scales are one 128-bit load whether blocks have 16 or 32 weights",
      .sms = {80, 89, 90},
      .accepts = accepts,
      .planes = planes,
      .pack = pack,
      .unpack = unpack,
      .place = place};
}

}  // namespace w4q::repack
