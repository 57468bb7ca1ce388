// What happens between the products, on the GPU: the twins of elementwise.h. The residual stream is fp32; what products
// read is rounded to f16 once. Sums of a row are added in a fixed order (class E2 against the CPU, bit-identical from
// run to run).
//
// With `overlap` a launch may begin while the one before it still runs (sm_90); weights must then have been complete
// before that one began.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace w4q::kernels {

/// What is added to the residual stream of one row before its norm: Σ shares[p] · parts[p] + sigmoid(gate) · shared.
struct PendingSum {
  const float* parts = nullptr;   ///< [places × cols]
  const float* shares = nullptr;  ///< [places]
  int places = 0;
  const float* shared = nullptr;  ///< [cols], or null
  const float* gate = nullptr;    ///< null: all of `shared`

  constexpr bool any() const { return places > 0 || shared != nullptr; }
};

/// out = w · x / √(mean(x²) + eps), row by row. Rows of x and out are `cols` apart.
struct NormArgs {
  const float* x = nullptr;       ///< [rows × cols], the residual stream
  const float* weight = nullptr;  ///< [cols]
  float eps = 0;
  int64_t rows = 0, cols = 0;
  __half* out = nullptr;      ///< [rows × cols]
  float* out_fp32 = nullptr;  ///< the same without rounding, or null
  float* state = nullptr;     ///< one row: the norm's state (linear_fusion.h), or null
  PendingSum pending = {};    ///< one row: is added to x, which changes
  bool overlap = false;
};
void rms_norm_cuda(const NormArgs& args, const device::Stream& stream);

/// y[r][i] += bias[i]; rows of y are `stride` apart.
void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, __half* y, int64_t stride,
                   const device::Stream& stream);
void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, __nv_bfloat16* y, int64_t stride,
                   const device::Stream& stream);
void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, float* y, int64_t stride,
                   const device::Stream& stream);

/// out[r][i] = silu(gate) · up, kept within the range of f16. Rows of gate_up are 2·inner apart, of out inner. A row is
/// all gates and then all ups, or with `turns` gate_up_turn of them in turn (linear_fusion.h; inner a multiple of it).
void silu_multiply_cuda(const __half* gate_up, int64_t rows, int64_t inner, bool turns, __half* out, bool overlap,
                        const device::Stream& stream);

/// The row of tables [positions × pairs] that belongs to a position, for all launches of a step that need it.
struct AngleRow {
  const float* cosines = nullptr;  ///< null: no row is taken
  const float* sines = nullptr;
  int pairs = 0;
  const int32_t* position = nullptr;  ///< in GPU memory
  float* cosine = nullptr;            ///< [pairs]
  float* sine = nullptr;
};

/// x[r] = table[ids[r]] · scale, widened; `table` [vocab × cols] is f32, f16 or bf16, ids are inside.
struct EmbedArgs {
  const void* table = nullptr;
  DType dtype = DType::f16;
  const int32_t* ids = nullptr;  ///< [rows], in GPU memory
  int64_t rows = 0, cols = 0;
  float* x = nullptr;  ///< [rows × cols]
  AngleRow angles = {};
  float scale = 1;
};
void embed_cuda(const EmbedArgs& args, const device::Stream& stream);

/// out[r][c] = x[r][c] / divisor[c], for linear layers with an input scale.
void divide_columns_cuda(const __half* x, const float* divisor, int64_t rows, int64_t cols, __half* out,
                         const device::Stream& stream);

}  // namespace w4q::kernels
