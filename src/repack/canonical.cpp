// The canonical layout: rows as quantizers produce them, for interchange and editing.
#include "formats/scheme_registry.h"
#include "repack/map_pass.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::Scheme;

bool accepts(const Scheme&, int64_t n, int64_t k, std::string* why) {
  if (n >= 1 && k >= 1 && n <= formats::max_dimension && k <= formats::max_dimension) return true;
  if (why != nullptr) *why = "n and k must be in 1 … 2^30";
  return false;
}

std::vector<formats::PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  return formats::scheme_row(scheme.family).planes(scheme, n, k);
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  check_layout(packed, formats::canonical_layout, planes(packed.scheme, packed.n, packed.k), name);
  return packed.clone();
}

PackedWeight pack(const PackedWeight& canonical) { return unpack(canonical, "pack"); }

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  return formats::scheme_row(scheme.family).place(scheme, n, k, row, col, bit);
}

}  // namespace

LayoutRow canonical_row() {
  return {.name = formats::canonical_layout,
          .description = "rows as quantized, for interchange and editing",
          .reason = "what quantizers write and every other layout unpacks to; rows can be cut out of it",
          .sms = {},
          .accepts = accepts,
          .planes = planes,
          .pack = pack,
          .unpack = unpack,
          .place = place};
}

}  // namespace w4q::repack
