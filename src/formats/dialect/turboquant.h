// TurboQuant's tensors of one pass, n outputs × k inputs in groups of d: indices U8 [n, ceil(k/2)], two codes a byte
// whatever their width, the even column in the low nibble; norms F32 or F16 [n, k/d], [n] where there is one group; a
// codebook F32 [2^bits]. They say what schemes rotated<bits>-d<d> with f32 and f16 norms say (docs/rotated.md).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "core/buffer.h"
#include "formats/packed.h"

namespace w4q::formats {

/// What has no place there: empty, or why. Norms of another type are widened.
std::string turboquant_loss(const Scheme& scheme, int64_t k);

/// Shapes of the two tensors.
Shape turboquant_indices_shape(int64_t n, int64_t k);
Shape turboquant_norms_shape(const Scheme& scheme, int64_t n, int64_t k);

/// Canonical planes. The spans have the bytes of the shapes. Throws bad_file naming `name` for an index that the
/// codebook does not have.
PackedWeight decode_turboquant(const Scheme& scheme, int64_t n, int64_t k, std::span<const std::byte> indices,
                               std::span<const std::byte> norms, std::span<const float> codebook,
                               std::string_view name);

/// The bytes of the two tensors; norms in their own type, or widened to f32.
Buffer turboquant_indices(const PackedWeight& canonical);
Buffer turboquant_norms(const PackedWeight& canonical, DType dtype);

}  // namespace w4q::formats
