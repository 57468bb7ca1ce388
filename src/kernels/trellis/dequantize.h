// Decodes trellises in GPU memory, in the layout trellis-fragment, to f32, f16 or bf16 rows. f32 equals
// formats::SchemeRow::decode_row bit for bit; f16 and bf16 are one rounding of it (class E1).
#pragma once

#include "kernels/dequantize/dequantize_cuda.h"

namespace w4q::kernels::trellis {

struct DeviceTrellis {
  formats::Scheme scheme;
  int64_t n = 0, k = 0;
  const uint32_t* codes = nullptr;  ///< of trellis-fragment, aligned to 16 bytes
  const void* scales = nullptr;     ///< [n] f16
  float unit = 0;                   ///< u
};

/// Queues the decoding of rows `first` … first + count − 1. Reads bits/8 bytes and writes one element per weight.
void dequantize(const DeviceTrellis& weight, int64_t first, int64_t count, const DeviceRows& out,
                const device::Stream& stream);

}  // namespace w4q::kernels::trellis
