// Small floats as other programs' checkpoints have them: codes two to a byte, the low nibble first, or bytes of E4M3;
// block scales as they stand in canonical planes; a factor of the tensor, or its reciprocal (docs/dialects.md).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/dialect/stored_tensor.h"
#include "formats/packed.h"

namespace w4q::formats {

/// The names that a dialect gives to the tensors of a linear.
struct FloatNames {
  std::string_view codes, scales;
  std::string_view factor;  ///< of NVFP4
  bool divides = false;     ///< what is stored is what scales are divided by
  /// ModelOpt's shapes: scales of rows are [n], of a tensor [], of blocks [n/128, 1, k/128, 1]; otherwise [n, 1], [1] and
  /// [n/128, k/128].
  bool flat_scales = false;
};

/// Codes, scales and, of NVFP4, the factor.
std::vector<StoredSpec> small_float_specs(const Scheme& scheme, int64_t n, int64_t k, const FloatNames& names);
/// In that order. The factor's reciprocal is rounded where it is asked for.
std::vector<StoredTensor> encode_small_float(const PackedWeight& canonical, const FloatNames& names);
/// Canonical planes of tensors with those names, of any shape with as many values.
PackedWeight decode_small_float(const Scheme& scheme, int64_t n, int64_t k, std::span<const StoredTensor> tensors,
                                const FloatNames& names);

/// Whether the factor's reciprocal has one that is the factor again, and no rounding on the way.
bool has_exact_reciprocal(float factor) noexcept;

}  // namespace w4q::formats
