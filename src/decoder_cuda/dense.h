// 16-bit and fp32 weights on their way to the GPU, which makes f16 of them.
#pragma once

#include "decoder_cuda/ring.h"
#include "kernels/linear/linear.h"

namespace w4q::decoder_cuda {

/// Queues the rows of a weight that is not packed as f16 [n × k] at `to`: exact but for magnitudes below 2^-14, which
/// keep 2^-25 absolute. UploadRing::finish() throws unsupported, naming the weight, for a value beyond ±65504 or not
/// finite; until then the weight stays where it is.
void upload_dense(const kernels::LinearWeight& weight, std::byte* to, UploadRing& ring);

/// What upload_dense throws.
[[noreturn]] void refuse_weight(const kernels::LinearWeight& weight, float value);

}  // namespace w4q::decoder_cuda
