#include "repack/kbit_rows.h"

#include "core/error.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "repack/map_pass.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

PackedWeight move_between(const KbitLayout& source, const KbitLayout& target, const PackedWeight& from,
                          std::string_view name, const MovePlanes& move) {
  const auto& [scheme, layout, n, k, ignored] = from;
  check_layout(from, source.name, source.planes(scheme, n, k), name);
  PackedWeight to = formats::allocate_planes(scheme, target.name, n, k, target.planes(scheme, n, k));
  move(from, to);
  to.plane(PlaneRole::codebook).bytes = from.plane(PlaneRole::codebook).bytes.clone();
  return to;
}

}  // namespace

bool accepts_kbit(const formats::Scheme& scheme, int64_t n, int64_t k, std::string* why) {
  const bool scheme_fits = scheme.family == formats::SchemeFamily::kbit && scheme.block == formats::kbit_block;
  return accepts_any_size(scheme_fits, "kbit schemes with blocks of 32", n, k, why);
}

std::vector<formats::PlaneSpec> canonical_planes(const formats::Scheme& scheme, int64_t n, int64_t k) {
  if (scheme.family != formats::SchemeFamily::kbit) {
    throw Error(ErrorCode::unsupported, concat("a layout of kbit schemes cannot hold ", to_string(scheme)));
  }
  return formats::scheme_row(scheme.family).planes(scheme, n, k);
}

PackedWeight pack_kbit(const KbitLayout& layout, const PackedWeight& canonical, const MovePlanes& move) {
  const KbitLayout source{formats::canonical_layout, canonical_planes};
  return move_between(source, layout, canonical, "pack", move);
}

PackedWeight unpack_kbit(const KbitLayout& layout, const PackedWeight& packed, std::string_view name,
                         const MovePlanes& move) {
  const KbitLayout target{formats::canonical_layout, canonical_planes};
  return move_between(layout, target, packed, name, move);
}

}  // namespace w4q::repack
