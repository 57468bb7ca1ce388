// Rows of logits in GPU memory: the twin of logits.h. fp32 in a thread's stretch, fp64 across threads; every row of one
// launch has a block of its own.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/sampling/logits.h"

namespace w4q::kernels {

/// out[r] = compare_logits(base row r, row r, ids[r]) for [rows × vocab] logits; without a base, null, only nll_b is
/// set. All are in GPU memory, ids are inside the vocabulary.
void compare_logits_cuda(const float* base, const float* logits, int64_t rows, int64_t vocab, const int32_t* ids,
                         LogitComparison* out, const device::Stream& stream);

}  // namespace w4q::kernels
