// Decodes small floats in GPU memory, in the layout float-fragment, to f32 or f16 rows. f32 is float(code) · (scale ·
// factor of the output), products rounded: formats::SchemeRow::decode_row bit for bit, but for factors that divide
// (nvfp4-div), whose reciprocals are rounded; f16 is one rounding of it (class E1).
#pragma once

#include "kernels/dequantize/dequantize_cuda.h"

namespace w4q::kernels::small_float {

struct DeviceFloats {
  formats::Scheme scheme;
  int64_t n = 0, k = 0;
  const uint32_t* codes = nullptr;        ///< of float-fragment, aligned to 16 bytes
  const void* scales = nullptr;           ///< DevicePass::scales
  const float* output_factors = nullptr;  ///< [n], or null
};

/// Queues the decoding of rows `first` … first + count − 1; `first` is a multiple of 64. Reads bits/8 bytes and the scales,
/// and writes one element per weight.
void dequantize(const DeviceFloats& weight, int64_t first, int64_t count, const DeviceRows& out,
                const device::Stream& stream);

}  // namespace w4q::kernels::small_float
