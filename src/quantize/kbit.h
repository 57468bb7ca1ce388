// The kbit quantizer: rounds a matrix to the nearest entries of a table, block by block. Two passes over the input, the
// first for block maxima and the exponent of the table's factor, the second for scales and codes (docs/kbit.md).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "quantize/quantizer_registry.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {

/// The registry row.
QuantizerRow kbit_quantizer();

/// Throws bad_argument for a scheme that is not of kbit.
void check_kbit_scheme(const formats::Scheme& scheme);
/// Throws bad_argument for options of other methods.
void check_kbit_options(const formats::Scheme& scheme, const QuantizeOptions& options);
/// The table as it will be stored, without the factor. Throws for an unknown name, or a table that does not fit.
std::vector<float> chosen_table(const formats::Scheme& scheme, const QuantizeOptions& options);
/// What both ways of quantizing start from: the largest magnitude of every block.
struct BlockMaxima {
  std::vector<float> absmax;  ///< n × blocks, row-major
  float smallest = 0;         ///< of the non-zero ones; 0 when there is none
  float largest = 0;
};
/// Throws bad_file naming row and column of the first NaN or infinity in row-major order.
BlockMaxima find_block_maxima(const TensorView& weight);

/// Canonical planes for `weight` with `codebook` filled in, codes and scales still zero.
formats::PackedWeight allocate_canonical(const TensorView& weight, const formats::Scheme& scheme,
                                         std::span<const float> codebook);

/// bitsandbytes' bytes: codes chosen by distance after dividing by the exact absmax, scales by its E4M4 rule. `weight`
/// has rows of whole blocks.
QuantizeResult quantize_bnb(const TensorView& weight, const formats::Scheme& scheme, const BlockMaxima& maxima);

}  // namespace w4q::quantize
