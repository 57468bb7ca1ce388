// Packed weights that stand in a checkpoint as kernels read them: they go to the GPU as they stand, out of the mapped
// file, and take their places in a stack there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "decoder_cuda/pack.h"
#include "decoder_cuda/ring.h"
#include "decoder_cuda/stack.h"
#include "device/properties.h"

namespace w4q::decoder_cuda {

/// Whether all passes of a linear go up as they stand: kernels read their layout on this GPU, and there is no padding
/// that somebody would have to look at.
bool goes_as_stored(const device::Properties& gpu, const formats::PackedLinear& linear);

/// The largest scale of pass `pass`, in its stored layout. Throws what load_canonical says of a damaged one.
float checked_scale(const formats::PackedLinear& linear, size_t pass);

/// Bytes of a plane of all weights together, and so many as take their places aligned.
size_t stacked_bytes(Weights weights, formats::PlaneRole role);
constexpr size_t place_bytes(size_t bytes) { return (bytes + 255) / 256 * 256; }
/// Queues a plane of weights in one layout, one below the other or `rows_in_turn` rows of each in turn, as that of one
/// weight. `staging` is other GPU memory of stacked_bytes.
void place_plane(Weights weights, formats::PlaneRole role, int64_t rows_in_turn, std::byte* to, std::byte* staging,
                 UploadRing& ring);

/// Queues the one pass of each of some linears that can_stack: as pack_for_device, which canonical ones take.
CudaPacked upload_stored(std::span<const formats::PackedLinear* const> linears, int64_t rows_in_turn, UploadRing& ring);

}  // namespace w4q::decoder_cuda
