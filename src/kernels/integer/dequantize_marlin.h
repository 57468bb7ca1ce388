// Decodes Marlin's words to 16-bit rows in GPU memory: (code − zero) · scale in fp32, rounded once (class E1).
#pragma once

#include "device/stream.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "kernels/linear/device_linear.h"

namespace w4q::kernels {

/// Queues the decoding of outputs `first` … first + count − 1; `first` is a multiple of 64. `out` is f16 or bf16, its
/// row 0 is output `first`; the inputs stand in their own order, also with act order. Arguments have been checked.
void dequantize_marlin(const DevicePass& weight, int64_t first, int64_t count, const DeviceRows& out,
                       const device::Stream& stream);

}  // namespace w4q::kernels
