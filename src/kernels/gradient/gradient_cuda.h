// The way back through what lies between the products of a layer, on the GPU, and the forward steps that it goes back
// through: the twins of elementwise.h, gates.h and attention_gradient.h in fp32 (class E2). Pointers are to GPU memory,
// rows one behind the other; everything is queued on the stream.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "kernels/elementwise/gates.h"

namespace w4q::kernels {

/// Rows [rows, size] that are normed each by itself: heads of tokens too, one behind the other.
struct NormedRows {
  const float* x = nullptr;
  const float* weight = nullptr;  ///< [size]
  float eps = 0;
  int64_t rows = 0, size = 0;
};
/// y = weight · x̂; y may be x.
void norm_rows_cuda(const NormedRows& norm, float* y, const device::Stream& stream);
/// `gradient` of a loss by y becomes that by x.
void norm_rows_gradient_cuda(const NormedRows& norm, float* gradient, const device::Stream& stream);
/// sums[c] += Σ gradient · x̂, with scratch of `rows` floats. Does not depend on anything but the values.
void norm_weight_gradient_cuda(const NormedRows& norm, const float* gradient, float* scratch, double* sums,
                               const device::Stream& stream);

/// Heads of `count` rows, at positions 0, 1, …
struct RotatedRows {
  float* x = nullptr;  ///< [count, heads · head_dim]
  int64_t count = 0, heads = 0, head_dim = 0;
  const float *cosine = nullptr, *sine = nullptr;  ///< [count, pairs]
  int64_t pairs = 0;
  bool neighbours = false;  ///< pairs (2i, 2i + 1)
  bool back = false;        ///< gradients
};
void rotate_rows_cuda(const RotatedRows& rows, const device::Stream& stream);

/// out = activation(gate) · up of `count` values.
void gate_rows_cuda(const Gating& gating, const float* gate, const float* up, int64_t count, float* out,
                    const device::Stream& stream);
/// The way back: by_gate and by_up of `gradient` by out.
void gate_rows_gradient_cuda(const Gating& gating, const float* gate, const float* up, const float* gradient,
                             int64_t count, float* by_gate, float* by_up, const device::Stream& stream);

/// to = values of f16 or bf16.
void widen_values_cuda(const void* values, DType dtype, int64_t count, float* to, const device::Stream& stream);

/// x += y, x = factor · x, and every row of x [rows, cols] += bias [cols].
void add_values_cuda(float* x, const float* y, int64_t count, const device::Stream& stream);
void scale_values_cuda(float* x, float factor, int64_t count, const device::Stream& stream);
void add_bias_cuda(float* x, const float* bias, int64_t rows, int64_t cols, const device::Stream& stream);

/// Causal attention of one sequence from position 0 on: queries [length, heads · head_dim], keys and values
/// [length, kv_heads · head_dim].
struct AttendedRows {
  const float *queries = nullptr, *keys = nullptr, *values = nullptr;
  int64_t length = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t window = 0;  ///< keys older than this many positions are not seen; 0: all are
  double scale = 0;    ///< 0: 1/√head_dim
};
/// Bytes of scratch for either.
int64_t attended_rows_scratch(const AttendedRows& rows);
/// out [length, heads · head_dim]. `workspace`: cuBLAS'.
void attend_rows_cuda(const AttendedRows& rows, float* out, void* scratch, void* workspace,
                      const device::Stream& stream);
/// From `gradient` by out to those by queries, keys and values.
void attend_rows_gradient_cuda(const AttendedRows& rows, const float* gradient, float* by_queries, float* by_keys,
                               float* by_values, void* scratch, void* workspace, const device::Stream& stream);

/// What a head's products become: scaled and capped.
struct LogitRows {
  float* products = nullptr;  ///< [rows, cols]
  int64_t rows = 0, cols = 0;
  double scale = 1, cap = 0;
};
/// Products become the gradient of −log p(next[r]) by them, rows with next < 0 that of nothing; losses [rows].
void cross_entropy_rows_cuda(const LogitRows& logits, const int32_t* next, double* losses,
                             const device::Stream& stream);
/// Products become the gradient of KL(expected ‖ products) by them; `expected` are a teacher's, with a scale and a cap of
/// their own.
void divergence_rows_cuda(const LogitRows& expected, const LogitRows& logits, double* losses,
                          const device::Stream& stream);

}  // namespace w4q::kernels
