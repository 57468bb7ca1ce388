// The family of table-coded formats: a code is an index into a table, and each block of weights has a scale.
//
//     value = table[code] · scale(block)                         products and quotients rounded to fp32
//     value = table[code] · (scale(block) · factor of the tensor), or · (scale(block) / divisor of the tensor)
//
// kbit, rotated, lut and the small floats are formats of it; what differs between them stands in TableFormat. The functions here are the
// plain CPU definition.
//
// Codes stand in units of 32, each `bits` words wide. bit_planes: a row of weights starts a unit, bit i of word p is
// bit p of the code of weight i (docs/kbit.md). dense: one stream (bit_stream.h) over the matrix taken flat, row after
// row; its blocks run across row ends too (docs/int.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/codebook.h"
#include "formats/packed.h"
#include "formats/scheme_registry.h"
#include "formats/table/nearest_entry.h"

namespace w4q::formats {

enum class CodeOrder { bit_planes, dense };

/// What an encoder makes the scale of a block from, and hence what the table's entries are relative to.
enum class ScaleRule {
  absmax_over_table,  ///< the block's absmax over the table's largest magnitude
  absmax,             ///< the block's absmax: the table's own largest magnitude is 1. A file's scales may be negative
  group_norm,         ///< the block's norm; entries are divided by √block (rotated.h)
  small_float,        ///< never zero (small_float.h)
};

struct TableFormat {
  int bits = 0;
  CodeOrder order = CodeOrder::bit_planes;
  bool ascending = true;  ///< entries ascend strictly; otherwise they stand in any order, and may be equal
  int block = 0;          ///< weights that share a scale, along k (dense: along the flat matrix), or whole_row
  int block_rows = 1;     ///< rows that share one too, or all_rows
  ScaleType scale = ScaleType::e8m0;
  ScaleRule rule = ScaleRule::absmax_over_table;
  bool reciprocal = false;  ///< codes are chosen for a weight times 1/scale, rounded, instead of its quotient
  Ties ties = Ties::lower;
  bool tensor_scale = false;          ///< a plane tensor_scale with a factor of the whole tensor …
  bool tensor_divides = false;        ///< … by which scales are divided
  std::span<const float> fixed = {};  ///< the one table there is; of 256 entries, 0x7F and 0xFF stand for no weight
};

/// TableFormat::block_rows of a format whose rows all share their scales.
inline constexpr int all_rows = 0;

/// Weights that share a scale in a row of k; for dense codes, of the flat matrix.
inline int64_t block_of(const TableFormat& format, int64_t k) noexcept {
  return format.block == whole_row ? k : format.block;
}

/// Which of the scales' rows belongs to a row of weights.
inline int64_t scale_row(const TableFormat& format, int64_t row) noexcept {
  return format.block_rows == all_rows ? 0 : row / format.block_rows;
}

/// Planes in the canonical layout. Throws unsupported naming `name` when n or k is out of range.
std::vector<PlaneSpec> table_planes(const TableFormat& format, int64_t n, int64_t k, std::string_view name);
/// Where bit `bit` of the code of weight (row, col) stands.
BitPlace table_place(const TableFormat& format, int64_t k, int64_t row, int64_t col, int bit) noexcept;
/// Row `row` of canonical planes into `out` (k values).
void table_decode_row(const TableFormat& format, const PackedWeight& canonical, int64_t row, std::span<float> out);
/// The codes of row `row` of canonical planes into `codes` (k of them).
void table_read_codes(const TableFormat& format, const PackedWeight& canonical, int64_t row, std::span<uint8_t> codes);
/// The reverse; of dense codes, where rows are whole words.
void table_write_codes(const TableFormat& format, PackedWeight& weight, int64_t row, std::span<const uint8_t> codes);
/// Fills zeroed canonical planes: table, scales and codes of `values` (n × k, finite). Throws bad_argument or bad_file
/// for a table that does not fit.
void table_encode(const TableFormat& format, std::span<const float> values, std::span<const float> codebook,
                  PackedWeight& weight);
/// Chooses codes anew under the scales and the table that `weight` has.
void table_recode(const TableFormat& format, PackedWeight& weight, std::span<const float> values);
/// Checks padding, table and scales of planes that have the right types and shapes. Throws bad_file naming `name`.
void table_validate(const TableFormat& format, const PackedWeight& canonical, std::string_view name);
/// SchemeRow::largest_scale. Nothing for nested scales.
std::optional<float> table_largest_scale(const TableFormat& format, const PackedWeight& packed, std::string_view name);
/// SchemeRow::error_bound. Infinite for nested scales and with a factor of the tensor.
double table_error_bound(const TableFormat& format, double absmax, std::span<const float> codebook);

/// Scale `index` of canonical planes, a nested one too, without the factor of the tensor.
float scale_at(const PackedWeight& canonical, int64_t index) noexcept;
/// The same as table entries are multiplied by it: with the factor of the tensor.
float full_scale_at(const TableFormat& format, const PackedWeight& canonical, int64_t index) noexcept;

/// What scales are multiplied with: the stored table; for norms, over √block, each entry rounded once.
std::vector<float> table_levels(const TableFormat& format, const PackedWeight& canonical);

/// A row of the registry: names from the caller, everything else from the format of each scheme.
struct TableSchemes {
  SchemeFamily family;
  std::string_view name, description, form;
  std::vector<Scheme> (*schemes)();
  std::string (*print)(const Scheme&);
  std::optional<Scheme> (*parse)(std::string_view);
  TableFormat (*table)(const Scheme&);
};
SchemeRow table_row(const TableSchemes& schemes);

}  // namespace w4q::formats
