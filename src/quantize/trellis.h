// The quantizer of the trellis family: a scale for every row, and rings of the least squared error under it. It takes
// weights that are rotated already (passes.h rotates) and never asks by what (docs/trellis.md).
#pragma once

#include "formats/trellis_search.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The registry row.
QuantizerRow trellis_quantizer();

/// Searches rings of one scheme, with scratch of its own.
formats::TrellisSearch trellis_search(const formats::Scheme& scheme, std::span<const float> fast_levels);

/// Planes with u and the scales of all rows, codes still zero. Throws bad_file naming tensor, row and column of a value
/// that is not finite.
formats::PackedWeight allocate_trellis(const TensorView& weight, const formats::Scheme& scheme);
/// The same for rows whose root mean squares (formats::trellis_rms) are `sizes` [n], all finite.
formats::PackedWeight allocate_trellis(const formats::Scheme& scheme, int64_t n, int64_t k,
                                       std::span<const double> sizes);
/// Counts of the rows of a weight that stands.
QuantizeStats trellis_stats(const formats::PackedWeight& packed);

}  // namespace w4q::quantize
