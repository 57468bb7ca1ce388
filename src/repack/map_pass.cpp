#include "repack/map_pass.h"

#include <cstring>

#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"

namespace w4q::repack {
namespace {

using formats::BitPlace;
using formats::PackedWeight;
using formats::PlaneRole;

/// Calls move(canonical place, place) for every code bit, in canonical planes and in those of `row`.
template <class Move>
void for_each_bit(const LayoutRow& row, const PackedWeight& weight, const Move& move) {
  const auto canonical = formats::scheme_row(weight.scheme.family).place;
  for (int64_t r = 0; r < weight.n; ++r) {
    for (int64_t c = 0; c < weight.k; ++c) {
      for (int bit = 0; bit < weight.scheme.bits; ++bit) {
        move(canonical(weight.scheme, weight.n, weight.k, r, c, bit),
             row.place(weight.scheme, weight.n, weight.k, r, c, bit));
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

/// Planes of another layout; those that are the same in every layout are filled in.
PackedWeight allocate(const PackedWeight& like, std::string_view layout, std::span<const formats::PlaneSpec> specs) {
  PackedWeight weight = formats::allocate_planes(like.scheme, layout, like.n, like.k, specs);
  for (formats::Plane& plane : weight.planes) {
    if (plane.spec.role == PlaneRole::codes || plane.spec.role == PlaneRole::scales) continue;
    plane.bytes = like.plane(plane.spec.role).bytes.clone();
  }
  return weight;
}

}  // namespace

PackedWeight pack_by_place(const LayoutRow& row, const PackedWeight& canonical) {
  PackedWeight packed = allocate(canonical, row.name, row.planes(canonical.scheme, canonical.n, canonical.k));
  const auto from = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto& from_scales = canonical.plane(PlaneRole::scales);
  auto& to_scales = packed.plane(PlaneRole::scales);
  for_each_bit(row, canonical, [&](BitPlace at, BitPlace place) {
    move_bit(from[static_cast<size_t>(at.word)], at.bit, to[static_cast<size_t>(place.word)], place.bit);
    move_scale(from_scales, at.scale, to_scales, place.scale);
  });
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
  for_each_bit(row, packed, [&](BitPlace at, BitPlace place) {
    move_bit(from[static_cast<size_t>(place.word)], place.bit, to[static_cast<size_t>(at.word)], at.bit);
    move_scale(from_scales, place.scale, to_scales, at.scale);
  });
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
