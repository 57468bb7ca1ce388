#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "repack/kbit_rows.h"
#include "repack/layout_rotated_fragment.h"
#include "repack/map_pass.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::Plane;
using formats::PlaneRole;
using formats::PlaneSpec;
using formats::Scheme;

constexpr std::string_view layout_name = "rotated-fragment";

bool accepts(const Scheme& scheme, int64_t n, int64_t k, std::string* why) {
  return accepts_any_size(scheme.family == formats::SchemeFamily::rotated, "rotated schemes", n, k, why);
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = accepted_planes(layout_name, accepts, scheme, n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codes) spec = fragment_codes(scheme.bits, n, k);
    if (spec.role == PlaneRole::scales) spec.shape = {(n + 63) / 64, formats::rotated_groups(scheme, k), 64};
  }
  return specs;
}

/// Calls move(canonical, packed, size) for every norm: where its bytes begin in the two planes, and how many they are.
template <class Move>
void for_each_norm(const PackedWeight& weight, const Move& move) {
  const int64_t groups = formats::rotated_groups(weight.scheme, weight.k);
  const auto size = static_cast<size_t>(dtype_bits(weight.plane(PlaneRole::scales).spec.dtype) / 8);
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      move(static_cast<size_t>(row * groups + group) * size, static_cast<size_t>(norm_place(row, group, groups)) * size,
           size);
    }
  }
}

/// Throws bad_file unless the norms of rows from n on are zero.
void check_norm_padding(const PackedWeight& packed, std::string_view name) {
  const Plane& norms = packed.plane(PlaneRole::scales);
  const int64_t groups = formats::rotated_groups(packed.scheme, packed.k);
  const int64_t size = dtype_bits(norms.spec.dtype) / 8;
  for (int64_t row = packed.n; row % 64 != 0; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const auto norm = norms.bytes.bytes().subspan(static_cast<size_t>(norm_place(row, group, groups) * size),
                                                    static_cast<size_t>(size));
      const bool zero = std::ranges::all_of(norm, [](std::byte byte) { return byte == std::byte{0}; });
      if (!zero) detail::refuse_padding(packed, name, PlaneRole::scales, row, group);
    }
  }
}

PackedWeight pack(const PackedWeight& canonical) {
  const auto& [scheme, layout, n, k, ignored] = canonical;
  const auto specs = planes(scheme, n, k);
  check_layout(canonical, formats::canonical_layout, formats::scheme_row(scheme.family).planes(scheme, n, k), "pack");
  PackedWeight packed = formats::allocate_planes(scheme, layout_name, n, k, specs);
  pack_fragment_codes(canonical, packed);
  const Plane& from = canonical.plane(PlaneRole::scales);
  Plane& to = packed.plane(PlaneRole::scales);
  for_each_norm(canonical, [&](size_t at, size_t place, size_t size) {
    std::memcpy(to.bytes.data() + place, from.bytes.data() + at, size);
  });
  packed.plane(PlaneRole::codebook).bytes = canonical.plane(PlaneRole::codebook).bytes.clone();
  return packed;
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  const auto& [scheme, layout, n, k, ignored] = packed;
  check_layout(packed, layout_name, planes(scheme, n, k), name);
  check_norm_padding(packed, name);
  PackedWeight canonical = formats::allocate_canonical(scheme, n, k);
  unpack_fragment_codes(packed, name, canonical);
  const Plane& from = packed.plane(PlaneRole::scales);
  Plane& to = canonical.plane(PlaneRole::scales);
  for_each_norm(packed, [&](size_t at, size_t place, size_t size) {
    std::memcpy(to.bytes.data() + at, from.bytes.data() + place, size);
  });
  canonical.plane(PlaneRole::codebook).bytes = packed.plane(PlaneRole::codebook).bytes.clone();
  return canonical;
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const auto at = KbitFragmentMap(n, k).code_bit(scheme.bits, row, col, bit);
  const int64_t groups = formats::rotated_groups(scheme, k);
  return {at.word, at.bit, norm_place(row, col / formats::rotated_group(scheme, k), groups)};
}

}  // namespace

LayoutRow rotated_fragment_row() {
  return {.name = layout_name,
          .description = "codes as in kbit-fragment and norms beside their lanes, for w4q's kernels of rotated weights",
          .reason = "what the GPU reads as it is stored; a lane's eight norms of a group are one 128-bit load",
          .sms = {80, 89, 90},
          .accepts = accepts,
          .planes = planes,
          .pack = pack,
          .unpack = unpack,
          .place = place};
}

}  // namespace w4q::repack
