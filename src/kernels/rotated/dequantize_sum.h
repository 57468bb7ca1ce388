// A rotated pass, or the sum of two, as 16-bit rows for cuBLAS to multiply.
#pragma once

#include "device/stream.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "kernels/rotated/launch.cuh"

namespace w4q::kernels::rotated {

struct DecodedPasses {
  Source sources[2];
  int bits[2];  ///< of widths_fit; the second 0: there is one pass
  int64_t k;
};

/// Queues the decoding of outputs `first` … first + count − 1; `first` is a multiple of 64, `out` f16, its row 0 is
/// output `first`. Sums are rounded once.
void dequantize_sum(const DecodedPasses& passes, int64_t first, int64_t count, const DeviceRows& out,
                    const device::Stream& stream);

}  // namespace w4q::kernels::rotated
