// Round to nearest for integer schemes on the GPU: the bytes of quantize/rtn.h (class E0).
#pragma once

#include "formats/packed.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Fills the canonical planes of `packed` (integer, no act order) from a matrix of f32, f16 or bf16 in host memory, a
/// strip of rows in GPU memory at a time. Throws bad_file naming the place of a NaN or infinity, device when the GPU
/// fails.
QuantizeStats rtn_encode_cuda(const TensorView& weight, Clip clip, formats::PackedWeight& packed, device::Context& gpu);

}  // namespace w4q::quantize
