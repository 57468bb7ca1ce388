#include "repack/map_pass.h"

#include <cstring>

#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

/// Calls move(canonical word, its bit, place) for every code bit, and move_scale(canonical scale, scale) for every
/// block.
template <class Move, class MoveScale>
void for_each_bit(const LayoutRow& row, const PackedWeight& weight, const Move& move, const MoveScale& move_scale) {
  const int64_t blocks = formats::kbit_blocks(weight.k);
  for (int64_t r = 0; r < weight.n; ++r) {
    for (int64_t c = 0; c < weight.k; ++c) {
      const int64_t block = r * blocks + c / formats::kbit_block;
      for (int bit = 0; bit < weight.scheme.bits; ++bit) {
        const LayoutRow::BitPlace place = row.place(weight.scheme, weight.n, weight.k, r, c, bit);
        move(block * weight.scheme.bits + bit, static_cast<int>(c % formats::kbit_block), place);
        if (bit == 0 && c % formats::kbit_block == 0) move_scale(block, place.scale);
      }
    }
  }
}

/// Sets bit `to_bit` of `to` to bit `from_bit` of `from`; `to` is zero there.
void move_bit(uint32_t from, int from_bit, uint32_t& to, int to_bit) noexcept {
  to |= ((from >> from_bit) & 1u) << to_bit;
}

void move_scale(const formats::Plane& from, int64_t from_index, formats::Plane& to, int64_t to_index) noexcept {
  const int64_t bytes = dtype_bits(from.spec.dtype) / 8;
  std::memcpy(to.bytes.data() + to_index * bytes, from.bytes.data() + from_index * bytes, static_cast<size_t>(bytes));
}

PackedWeight allocate(const PackedWeight& like, std::string_view layout, std::span<const formats::PlaneSpec> specs) {
  PackedWeight weight = formats::allocate_planes(like.scheme, layout, like.n, like.k, specs);
  weight.plane(PlaneRole::codebook).bytes = like.plane(PlaneRole::codebook).bytes.clone();
  return weight;
}

}  // namespace

PackedWeight pack_by_place(const LayoutRow& row, const PackedWeight& canonical) {
  PackedWeight packed = allocate(canonical, row.name, row.planes(canonical.scheme, canonical.n, canonical.k));
  const auto from = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto& from_scales = canonical.plane(PlaneRole::scales);
  auto& to_scales = packed.plane(PlaneRole::scales);
  for_each_bit(
      row, canonical,
      [&](int64_t word, int bit, LayoutRow::BitPlace place) {
        move_bit(from[static_cast<size_t>(word)], bit, to[static_cast<size_t>(place.word)], place.bit);
      },
      [&](int64_t block, int64_t scale) { move_scale(from_scales, block, to_scales, scale); });
  return packed;
}

PackedWeight unpack_by_place(const LayoutRow& row, const PackedWeight& packed) {
  const auto& scheme_row = formats::scheme_row(packed.scheme.family);
  PackedWeight canonical =
      allocate(packed, formats::canonical_layout, scheme_row.planes(packed.scheme, packed.n, packed.k));
  const auto from = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto& from_scales = packed.plane(PlaneRole::scales);
  auto& to_scales = canonical.plane(PlaneRole::scales);
  for_each_bit(
      row, packed,
      [&](int64_t word, int bit, LayoutRow::BitPlace place) {
        move_bit(from[static_cast<size_t>(place.word)], place.bit, to[static_cast<size_t>(word)], bit);
      },
      [&](int64_t block, int64_t scale) { move_scale(from_scales, scale, to_scales, block); });
  return canonical;
}

void check_layout(const PackedWeight& weight, std::string_view layout, std::span<const formats::PlaneSpec> specs,
                  std::string_view name) {
  if (weight.layout != layout) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": stands in another layout"))
        .detail(concat("expected ", layout, ", got ", printable(weight.layout)));
  }
  formats::check_planes(weight, specs, name);
}

namespace detail {

void refuse_padding(const PackedWeight& packed, std::string_view name, PlaneRole role, int64_t row, int64_t block) {
  throw Error(ErrorCode::bad_file,
              concat(printable(name), ": plane ", to_string(role), " has padding that is not zero"))
      .detail(concat("layout ", packed.layout, ", row ", row, ", block ", block, "; the weight has ", packed.n,
                     " rows of ", formats::kbit_blocks(packed.k), " blocks"));
}

}  // namespace detail
}  // namespace w4q::repack
