#include "repack/kbit_rows.h"

#include "core/error.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"

namespace w4q::repack {

bool accepts_kbit(const formats::Scheme& scheme, int64_t n, int64_t k, std::string* why) {
  const bool scheme_fits = scheme.family == formats::SchemeFamily::kbit && scheme.block == formats::kbit_block;
  const bool size_fits = n >= 1 && k >= 1 && n <= formats::max_dimension && k <= formats::max_dimension;
  if (scheme_fits && size_fits) return true;
  if (why != nullptr) {
    *why = scheme_fits ? "n and k must be in 1 … 2^30" : "it holds kbit schemes with blocks of 32 only";
  }
  return false;
}

std::vector<formats::PlaneSpec> canonical_planes(const formats::Scheme& scheme, int64_t n, int64_t k) {
  if (scheme.family != formats::SchemeFamily::kbit) {
    throw Error(ErrorCode::unsupported, concat("a layout of kbit schemes cannot hold ", to_string(scheme)));
  }
  return formats::scheme_row(scheme.family).planes(scheme, n, k);
}

void copy_codebook(const formats::PackedWeight& from, formats::PackedWeight& to) {
  to.plane(formats::PlaneRole::codebook).bytes = from.plane(formats::PlaneRole::codebook).bytes.clone();
}

}  // namespace w4q::repack
