// Several passes over one weight: each quantizes, in the basis that its rotation gives, what the passes before it have
// left over. One unrotated pass is the plain case; this is for all others (docs/rotated.md).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "formats/rotation.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// What one pass quantizes to, and how the input of its weights is rotated.
struct Pass {
  formats::Scheme scheme;
  formats::Rotation rotation = {};
};

/// Which rotations passes get.
struct RotationChoice {
  std::optional<uint64_t> seed = 42;  ///< nothing: no signs
  uint64_t residual_seed = 1042;      ///< of the second pass where it has its own; each further one adds 1000
  bool shared = true;                 ///< further passes take the rotated input of the first
  formats::Rotation first = {};       ///< of the first pass, whatever its scheme; none: what its scheme brings
};

/// A rotated scheme rotates blocks of its groups' size; others take no rotation of their own. Further passes share the
/// first's if so chosen, or have blocks and a seed of their own.
std::vector<Pass> plan_passes(const formats::Scheme& first, std::span<const formats::Scheme> further,
                              const RotationChoice& choice);

/// What is left of the first pass's options for a pass of `scheme`: tables and rules of a family mean nothing to
/// others.
QuantizeOptions options_of_pass(const QuantizeOptions& options, const formats::Scheme& first,
                                const formats::Scheme& scheme);

/// The quantizer of one pass: QuantizerRow::run of whatever fits the scheme.
using QuantizePass = std::function<QuantizeResult(const TensorView& weight, const formats::Scheme& scheme)>;

struct PassesResult {
  formats::PackedLinear linear;
  QuantizeStats stats;  ///< of all passes; the exponent is that of the first
};

/// Quantizes `weight` (n × k, f32, f16 or bf16) in `passes`. Holds one fp32 copy of it. Throws as the quantizers do.
PassesResult quantize_passes(const TensorView& weight, std::span<const Pass> passes, const QuantizePass& quantize);

}  // namespace w4q::quantize
