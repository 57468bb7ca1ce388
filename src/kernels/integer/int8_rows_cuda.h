// Rows of activations to int8 on the GPU: the twin of quantize_int8 (int8_rows.h), byte for byte (class E0), and what
// else a product with them needs (int8_linear.h). Reads x twice, the second time from the caches.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "kernels/integer/int8_order.h"

namespace w4q::kernels {

struct Int8RowsArgs {
  int64_t m = 0, k = 0;
  DType activation = DType::f16;  ///< type of x: f16 or bf16
  const void* x = nullptr;        ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  const int32_t* input_order = nullptr;  ///< [k] the input that stands at each place; null: as they come
  uint8_t* codes = nullptr;              ///< int8::Int8Order(m, k), aligned to 16 bytes; padding rows are left alone
  float* scales = nullptr;               ///< [m]
  /// [k / sum_inputs, up to whole 128][padded rows] Σ q of so many inputs, 32 or 128; null: not wanted
  int16_t* sums = nullptr;
  int sum_inputs = 128;
  unsigned* counters = nullptr;  ///< [counter_count], set to zero on the way
  int counter_count = 0;
};

void int8_rows_cuda(const Int8RowsArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
