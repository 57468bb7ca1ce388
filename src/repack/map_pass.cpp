#include "repack/map_pass.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"

namespace w4q::repack {
namespace {

using formats::BitPlace;
using formats::PackedWeight;
using formats::PlaneRole;

/// The input that the layout takes c-th, for every c.
std::vector<int64_t> input_order(const LayoutRow& row, const PackedWeight& weight) {
  std::vector<int64_t> order(static_cast<size_t>(weight.k));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (!row.sorts_inputs || !weight.scheme.act_order) return order;
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  std::ranges::stable_sort(order, {}, [&](int64_t input) { return index[static_cast<size_t>(input)]; });
  return order;
}

/// Calls move(canonical place, place) for every code bit, in canonical planes and in those of `row`, and
/// move_scale(canonical index, index) for every weight's scale.
template <class Move, class MoveScale>
void for_each_bit(const LayoutRow& row, const PackedWeight& weight, const Move& move, const MoveScale& move_scale) {
  const auto& [scheme, layout, n, k, planes] = weight;
  const auto canonical = formats::scheme_row(scheme.family).place;
  const std::vector<int64_t> order = input_order(row, weight);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      for (int bit = 0; bit < scheme.bits; ++bit) {
        move(canonical(scheme, n, k, r, order[static_cast<size_t>(c)], bit), row.place(scheme, n, k, r, c, bit));
      }
      move_scale(canonical(scheme, n, k, r, c, 0).scale, row.place(scheme, n, k, r, c, 0).scale);
    }
  }
}

/// Calls move(index of a canonical zero, bit, place) for every bit of a zero that the layout packs.
template <class Move>
void for_each_zero_bit(const LayoutRow& row, const PackedWeight& weight, const Move& move) {
  if (row.zero_place == nullptr || !weight.scheme.asymmetric) return;
  const int64_t groups = formats::integer_groups(weight.scheme, weight.k);
  for (int64_t r = 0; r < weight.n; ++r) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int bit = 0; bit < weight.scheme.bits; ++bit) {
        move(static_cast<size_t>(r * groups + group), bit,
             row.zero_place(weight.scheme, weight.n, weight.k, r, group, bit));
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

/// Planes of another layout; those that stand alike in both are filled in.
PackedWeight allocate(const LayoutRow& row, const PackedWeight& like, std::string_view layout,
                      std::span<const formats::PlaneSpec> specs) {
  PackedWeight weight = formats::allocate_planes(like.scheme, layout, like.n, like.k, specs);
  for (formats::Plane& plane : weight.planes) {
    if (plane.spec.role == PlaneRole::codes || plane.spec.role == PlaneRole::scales) continue;
    if (plane.spec.role == PlaneRole::zeros && row.zero_place != nullptr) continue;
    plane.bytes = like.plane(plane.spec.role).bytes.clone();
  }
  return weight;
}

}  // namespace

PackedWeight pack_by_place(const LayoutRow& row, const PackedWeight& canonical) {
  PackedWeight packed = allocate(row, canonical, row.name, row.planes(canonical.scheme, canonical.n, canonical.k));
  const auto from = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto& from_scales = canonical.plane(PlaneRole::scales);
  auto& to_scales = packed.plane(PlaneRole::scales);
  for_each_bit(
      row, canonical,
      [&](BitPlace at, BitPlace place) {
        move_bit(from[static_cast<size_t>(at.word)], at.bit, to[static_cast<size_t>(place.word)], place.bit);
      },
      [&](int64_t at, int64_t place) { move_scale(from_scales, at, to_scales, place); });
  for_each_zero_bit(row, canonical, [&](size_t at, int bit, LayoutRow::ZeroPlace place) {
    const uint8_t zero = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>()[at];
    auto& word = packed.plane(PlaneRole::zeros).bytes.as<uint32_t>()[static_cast<size_t>(place.word)];
    move_bit(zero, bit, word, place.bit);
  });
  return packed;
}

PackedWeight unpack_by_place(const LayoutRow& row, const PackedWeight& packed) {
  const auto& scheme_row = formats::scheme_row(packed.scheme.family);
  PackedWeight canonical =
      allocate(row, packed, formats::canonical_layout, scheme_row.planes(packed.scheme, packed.n, packed.k));
  const auto from = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto& from_scales = packed.plane(PlaneRole::scales);
  auto& to_scales = canonical.plane(PlaneRole::scales);
  for_each_bit(
      row, packed,
      [&](BitPlace at, BitPlace place) {
        move_bit(from[static_cast<size_t>(place.word)], place.bit, to[static_cast<size_t>(at.word)], at.bit);
      },
      [&](int64_t at, int64_t place) { move_scale(from_scales, place, to_scales, at); });
  for_each_zero_bit(row, packed, [&](size_t at, int bit, LayoutRow::ZeroPlace place) {
    const uint32_t word = packed.plane(PlaneRole::zeros).bytes.as<uint32_t>()[static_cast<size_t>(place.word)];
    auto& zero = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>()[at];
    zero = static_cast<uint8_t>(zero | ((word >> place.bit) & 1u) << bit);
  });
  return canonical;
}

bool accepts_any_size(bool scheme_fits, std::string_view holds, int64_t n, int64_t k, std::string* why) {
  const bool size_fits = n >= 1 && k >= 1 && n <= formats::max_dimension && k <= formats::max_dimension;
  if (scheme_fits && size_fits) return true;
  if (why != nullptr) *why = scheme_fits ? "n and k must be in 1 … 2^30" : concat("it holds ", holds, " only");
  return false;
}

std::vector<formats::PlaneSpec> accepted_planes(std::string_view layout, decltype(LayoutRow::accepts) accepts,
                                                const formats::Scheme& scheme, int64_t n, int64_t k) {
  std::string why;
  if (accepts(scheme, n, k, &why)) return formats::scheme_row(scheme.family).planes(scheme, n, k);
  throw Error(ErrorCode::unsupported, concat("layout ", layout, " cannot hold ", to_string(scheme))).detail(why);
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
