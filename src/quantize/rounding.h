// What a scheme makes of weights, without packing them: for searches that round the same matrix many times.
#pragma once

#include <cstdint>
#include <functional>

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Replaces weights [rows, cols] by the values that the scheme's quantizer would store for them, in place. Works on any
/// rows, and on any columns that begin at a block; called from several threads at once.
using RoundWeights = std::function<void(MatrixView<float> weights)>;

/// How a scheme rounds, and what a clip of its blocks looks like.
struct Rounding {
  RoundWeights round;
  int64_t block = 0;       ///< weights along a row that share a scale
  bool symmetric = false;  ///< a block's range is ±its largest magnitude; otherwise from its minimum to its maximum
};

/// The quantizer that rounds to a scheme's levels without further knowledge. Throws unsupported for a family that has
/// none.
const QuantizerRow& rounding_quantizer(const formats::Scheme& scheme);

/// How `scheme` rounds rows of k weights, with these options. For a trellis what its scales make of 2^bits levels for
/// N(0, 1), one for each weight: errors go the same way with the weights, and a search takes a thousandth of the time.
Rounding rounding_of(const formats::Scheme& scheme, int64_t k, const QuantizeOptions& options);

}  // namespace w4q::quantize
