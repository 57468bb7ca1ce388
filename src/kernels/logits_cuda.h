// Rows of logits in GPU memory: the twin of logits.h. fp32 in a thread's stretch, fp64 across threads; every row of one
// launch has a block of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "kernels/logits.h"

namespace w4q::kernels {

struct LogitRows {
  const void* data = nullptr;  ///< [rows × vocab], rows without gaps; null: none
  DType dtype = DType::f32;    ///< f32 or f16
};

/// out[r] = compare_logits(base row r, row r, ids[r]); without a base only nll_b is set. `ids` [rows] and `out` [rows]
/// are in GPU memory, ids are inside the vocabulary.
void compare_logits_cuda(const LogitRows& base, const LogitRows& logits, int64_t rows, int64_t vocab,
                         const int32_t* ids, LogitComparison* out, cudaStream_t stream);

}  // namespace w4q::kernels
