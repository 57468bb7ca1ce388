// Trellises on their way to the GPU, behind a rotation or without one (docs/kernels/trellis.md).
#pragma once

#include <span>
#include <vector>

#include "decoder_cuda/ring.h"
#include "device/buffer.h"
#include "formats/packed.h"
#include "kernels/linear/device_linear.h"

namespace w4q::decoder_cuda {

/// Whether all passes of `linear` are trellises that the GPU's kernels multiply as they are, in the canonical layout or
/// in trellis-fragment.
bool reads_trellis(const formats::PackedLinear& linear);
/// Whether such a linear goes up as it stands: there is no padding that somebody would have to look at.
bool trellis_goes_as_stored(const formats::PackedLinear& linear);
/// Whether the rows of `b` can stand below those of `a`, which are whole strips then.
bool can_stack_trellis(const formats::PackedLinear& a, const formats::PackedLinear& b);

/// Passes of linears below one another, in GPU memory.
struct CudaTrellis {
  std::vector<kernels::DevicePass> passes;
  std::vector<device::DeviceBuffer> memory;
  int64_t bytes = 0;  ///< that a product reads
};

/// Queues linears that can_stack_trellis; canonical ones are packed on the GPU. Throws bad_file for stored planes that are
/// damaged, device when the memory does not suffice.
CudaTrellis upload_trellis(std::span<const formats::PackedLinear* const> linears, UploadRing& ring);

}  // namespace w4q::decoder_cuda
