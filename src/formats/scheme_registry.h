// The table of schemes. One row holds the plain CPU definition that everything else is tested against.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/packed.h"
#include "formats/scheme.h"

namespace w4q::formats {

struct SchemeRow {
  SchemeFamily family;
  std::string_view name;             ///< "kbit"
  std::string_view description;      ///< one line for `w4q list`
  std::vector<Scheme> (*schemes)();  ///< every scheme of the family
  /// Planes of an n × k weight in the canonical layout. Throws unsupported when a dimension is out of range.
  std::vector<PlaneSpec> (*planes)(const Scheme&, int64_t n, int64_t k);
  /// Checks everything a hostile file could get wrong in canonical planes: types, shapes, padding, codebook, scales.
  /// Throws bad_file naming `name`, the place, expected and found.
  void (*validate)(const PackedWeight& canonical, std::string_view name);
  /// The reference decoder: row `row` of a canonical weight that passed validate() into `out` (k values).
  void (*decode_row)(const PackedWeight& canonical, int64_t row, std::span<float> out);
  /// The reference encoder: `values` (n × k, row-major, finite) with the given codebook into canonical planes. Throws
  /// bad_argument when the number of values, a value or the codebook does not fit.
  PackedWeight (*encode)(const Scheme&, std::span<const float> values, int64_t n, int64_t k,
                         std::span<const float> codebook);
  /// Upper bound of |x − x̂| in a block with the given absmax. The codebook is the stored one, factor included.
  double (*error_bound)(const Scheme&, double absmax, std::span<const float> codebook);
  /// Stored bits per weight of an n × k matrix, scales and codebook included.
  double (*bits_per_weight)(const Scheme&, int64_t n, int64_t k);
};

std::span<const SchemeRow> scheme_registry() noexcept;
const SchemeRow& scheme_row(SchemeFamily family) noexcept;

}  // namespace w4q::formats
