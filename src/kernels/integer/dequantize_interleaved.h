// Decodes block-interleaved words to 16-bit rows in GPU memory: (code − zero) · scale in fp32, rounded once (class E1).
#pragma once

#include "device/stream.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "kernels/linear/device_linear.h"

namespace w4q::kernels {

/// Queues the decoding of outputs `first` … first + count − 1. `out` is f16 or bf16, its row 0 is output `first`.
/// Arguments have been checked.
void dequantize_interleaved(const DevicePass& pass, int64_t first, int64_t count, const DeviceRows& out,
                            const device::Stream& stream);

}  // namespace w4q::kernels
