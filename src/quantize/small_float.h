// The quantizer of small floats (formats/small_float.h): NVFP4, MXFP4, MXFP8, FP8. Plain: every scale from its block's
// largest magnitude. Searched: the scale with the least squared error, weighted by the channels' importance, in which a
// block's maximum may become any of the larger floats (docs/floats.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/small_float.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The registry row.
QuantizerRow small_float_quantizer();

/// Throws bad_argument for a scheme of another family, or for options that the family does not honour.
void check_small_float(const formats::Scheme& scheme, const QuantizeOptions& options);

/// Columns that share a scale: k where rows or a tensor do.
int64_t float_block(const formats::Scheme& scheme, int64_t k) noexcept;

/// Largest magnitudes of the blocks of a weight, in the order of its scales.
struct FloatMaxima {
  std::vector<float> absmax;
  float largest = 0;
};
/// Throws bad_file naming row and column of a NaN or infinity.
FloatMaxima find_float_maxima(const TensorView& weight, const formats::Scheme& scheme);

/// Planes with table and factor: the options', or that of the largest weight.
formats::PackedWeight allocate_small_float(const TensorView& weight, const formats::Scheme& scheme,
                                           const FloatMaxima& maxima, const QuantizeOptions& options);
/// The power of two that scales are relative to.
float float_factor(const formats::PackedWeight& packed);

/// The scales of a scheme whose rows share them, by the rule that the options ask for.
void choose_shared_scales(const TensorView& weight, const FloatMaxima& maxima, std::span<const float> importance,
                          Scales rule, formats::PackedWeight& packed);

/// Counts of the blocks of a weight that stands.
QuantizeStats float_stats(const formats::PackedWeight& packed, const FloatMaxima& maxima);

/// Replaces finite weights by what plain rounding makes of them, with a factor and shared scales of their own.
void round_small_floats(const formats::Scheme& scheme, MatrixView<float> weights);

}  // namespace w4q::quantize
