// The quantizer of bitsandbytes' 4-bit format (formats/lut.h). Plain: block maxima, the bytes that bitsandbytes stores.
// Searched: the scale of each block with the least squared error, weighted by the channels' importance; nested scales
// are made of those, as bitsandbytes nests maxima, and codes are chosen under what they decode to (docs/int.md).
#pragma once

#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The registry row.
QuantizerRow lut_quantizer();

/// Throws bad_argument for a scheme of another family, for options that the family does not honour, and for searched
/// scales, feedback or a learned order where blocks run across rows of k, or where the table does not ascend.
void check_lut(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options);

/// Planes with the table that the options ask for, and with scales by their rule, nested ones too. Throws bad_file
/// naming row and column of a NaN or infinity.
QuantizeResult allocate_lut(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options);

}  // namespace w4q::quantize
