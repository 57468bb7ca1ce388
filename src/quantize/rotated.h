// The quantizer of the rotated family: a norm for every group, codes nearest to the table's levels times the decoded
// norm. It takes weights that are rotated already (passes.h rotates) and never asks by what (docs/rotated.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/rotated.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The registry row.
QuantizerRow rotated_quantizer();

/// Throws bad_argument for a scheme of another family, or for options that the family does not honour.
void check_rotated(const formats::Scheme& scheme, const QuantizeOptions& options);
/// The table as it will be stored, without the factor of the tensor's range.
std::vector<float> rotated_table(const formats::Scheme& scheme, const QuantizeOptions& options);
/// The exponent of that factor, for norms of which the least that is not zero and the largest are given.
int rotated_range_exponent(double smallest, double largest, formats::ScaleType type) noexcept;

/// Levels and midpoints of a table for groups of one size.
struct RotatedLevels {
  std::vector<float> levels, midpoints;

  RotatedLevels(std::span<const float> codebook, int64_t group);
};

/// Planes with the codebook filled in, `table` times the factor of the range, codes and norms still zero.
formats::PackedWeight allocate_rotated(const formats::Scheme& scheme, int64_t n, int64_t k,
                                       std::span<const float> table, int range_exponent);
/// Counts of the groups of a weight that stands.
QuantizeStats rotated_stats(const formats::PackedWeight& packed, int range_exponent);

}  // namespace w4q::quantize
