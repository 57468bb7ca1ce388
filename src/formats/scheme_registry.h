// The table of schemes. One row holds the plain CPU definition that everything else is tested against.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/packed.h"
#include "formats/scheme.h"

namespace w4q::formats {

/// Where one bit of a code stands: (word, bit in word) of the codes plane, and the index of the scale of its weight.
/// With act order the scale is that of group col div block, whichever inputs group_index puts into it.
struct BitPlace {
  int64_t word;
  int bit;
  int64_t scale;
};

struct TableFormat;

struct SchemeRow {
  SchemeFamily family;
  std::string_view name;         ///< "kbit"
  std::string_view description;  ///< one line for `w4q list`
  /// How the names of a family with endlessly many schemes are built; empty when schemes() lists them all.
  std::string_view form;
  std::vector<Scheme> (*schemes)();  ///< every scheme of the family, or representative ones
  std::string (*print)(const Scheme&);
  /// The inverse of print; nothing for the name of no scheme of this family.
  std::optional<Scheme> (*parse)(std::string_view);
  /// What the codes index and how they stand; null for a family without a table (table/table_format.h).
  TableFormat (*table)(const Scheme&);
  /// Planes of an n × k weight in the canonical layout. Throws unsupported when a dimension is out of range.
  std::vector<PlaneSpec> (*planes)(const Scheme&, int64_t n, int64_t k);
  /// Checks everything a hostile file could get wrong in canonical planes: types, shapes, padding, codebook, scales.
  /// Throws bad_file naming `name`, the place, expected and found.
  void (*validate)(const PackedWeight& canonical, std::string_view name);
  /// The same of planes in any layout, but for padding: the largest magnitude of their scales, or nothing where it takes
  /// validate() of canonical planes to say what is wrong (or, of nested scales, whether). Throws what that says of the
  /// table, naming `name`.
  std::optional<float> (*largest_scale)(const PackedWeight& packed, std::string_view name);
  /// The reference decoder: row `row` of a canonical weight that passed validate() into `out` (k values).
  void (*decode_row)(const PackedWeight& canonical, int64_t row, std::span<float> out);
  /// The reference encoder: `values` (n × k, row-major, finite) with the given codebook (empty for families without
  /// one) into canonical planes. Throws bad_argument when the number of values, a value or the codebook does not fit.
  PackedWeight (*encode)(const Scheme&, std::span<const float> values, int64_t n, int64_t k,
                         std::span<const float> codebook);
  /// Chooses the codes of `weight` anew for `values` under the scales, zeros and table that it has.
  void (*recode)(PackedWeight& weight, std::span<const float> values);
  /// Upper bound of |x − x̂| in a block with the given absmax. The codebook is the stored one, factor included.
  /// Infinity where a block's own absmax does not bound it (nested scales).
  double (*error_bound)(const Scheme&, double absmax, std::span<const float> codebook);
  /// Stored bits per weight of an n × k matrix, scales and codebook included.
  double (*bits_per_weight)(const Scheme&, int64_t n, int64_t k);
  /// Where bit `bit` of the code of weight (row, col) stands in canonical planes.
  BitPlace (*place)(const Scheme&, int64_t n, int64_t k, int64_t row, int64_t col, int bit);
  /// decode_row for rows from `begin` on, where several together cost less than one by one; null: they do not.
  void (*decode_rows)(const PackedWeight& canonical, int64_t begin, MatrixView<float> out) = nullptr;
};

/// Throws bad_file naming `name` unless a canonical weight has a scheme that the row can say, and is canonical: the
/// first things that SchemeRow::validate of a family with an open set of schemes looks at.
void check_canonical(const SchemeRow& row, const PackedWeight& weight, std::string_view name);

std::span<const SchemeRow> scheme_registry() noexcept;
const SchemeRow& scheme_row(SchemeFamily family) noexcept;

/// Row `row` of what a canonical linear computes with, Σ_p W_p · R_p ⊘ s, into `out` (k values): the reference decoder.
void decode_linear_row(const PackedLinear& linear, int64_t row, std::span<float> out);

/// The same of rows from `begin` on, as many as `out` has.
void decode_linear_rows(const PackedLinear& linear, int64_t begin, MatrixView<float> out);

/// Zeroed canonical planes of a scheme.
PackedWeight allocate_canonical(const Scheme& scheme, int64_t n, int64_t k);

/// SchemeRow::bits_per_weight for families whose planes follow from scheme, n and k: the sum of their bytes.
double bits_per_weight_of_planes(std::span<const PlaneSpec> planes, int64_t n, int64_t k);
/// Checks what an encoder is given: n, k, the number of values, and that all are finite. Throws bad_argument.
void check_values(std::span<const float> values, int64_t n, int64_t k);

}  // namespace w4q::formats
