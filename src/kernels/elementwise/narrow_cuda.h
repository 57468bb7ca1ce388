// Weights of 16 and 32 bits as f16, which is what products on the GPU read: the bits of core/convert.h's narrow.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace w4q::kernels {

/// Queues to[i] = f16(from[i]), rounded to nearest even, for values of f16, bf16 or f32; `from` may be `to` where it
/// has 16 bits. `*stray` is lowered to `first` + i for what is beyond ±65504 or not a number.
void narrow_cuda(const void* from, DType type, int64_t count, __half* to, unsigned long long* stray, int64_t first,
                 const device::Stream& stream);

}  // namespace w4q::kernels
