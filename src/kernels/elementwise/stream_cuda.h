// What blocks do to the residual stream beside adding a product to it, on the GPU: norms and scales of what is added,
// embeddings of layers, and what is done to logits.
#pragma once

#include <cuda_fp16.h>
#include <cstdint>

#include "device/stream.h"
#include "kernels/elementwise/gates.h"

namespace w4q::kernels {

/// y = (y + factor · norm(x)) · stream_scale, row by row; norm(x) = w · x / √(mean(x²) + eps), or x. Sums in a fixed
/// order.
struct AddNormedArgs {
  const float* x = nullptr;       ///< [rows × cols]
  const float* weight = nullptr;  ///< [cols]; null: x is added as it is
  float eps = 0;
  int64_t rows = 0, cols = 0;
  float factor = 1;
  const float* stream_scale = nullptr;  ///< one value in GPU memory; null: 1
  float* y = nullptr;                   ///< [rows × cols]
  bool overlap = false;
};
void add_normed_cuda(const AddNormedArgs& args, const device::Stream& stream);

/// out = f16(x), held within its range.
void round_stream_cuda(const float* x, int64_t count, __half* out, bool overlap, const device::Stream& stream);

/// logits · scale, and with a cap c · tanh(logits / c).
void cap_logits_cuda(float* logits, int64_t count, float scale, float cap, bool overlap, const device::Stream& stream);

/// out[r][i] = activation(gate[r][i]) · up[r][i]; rows of out are `cols` apart.
struct GateRowsArgs {
  const float* gate = nullptr;
  int64_t gate_stride = 0;
  const float* up = nullptr;
  int64_t up_stride = 0;
  int64_t rows = 0, cols = 0;
  __half* out = nullptr;
  bool overlap = false;
};
void gate_rows_cuda(const Gating& gating, const GateRowsArgs& args, const device::Stream& stream);

/// What layers add of their own: out[r][l] = (norm(projected[r][l] / √hidden) + table[ids[r]][l] · √size) / √2, where l
/// is one of `layers` and the norm goes over `size` values.
struct EmbedLayersArgs {
  const float* projected = nullptr;  ///< [rows × layers · size]
  const __half* table = nullptr;     ///< [vocab × layers · size]
  const int32_t* ids = nullptr;      ///< [rows], in GPU memory
  const float* norm = nullptr;       ///< [size]
  float eps = 0;
  int64_t rows = 0, layers = 0, size = 0, hidden = 0;
  float* out = nullptr;
  bool overlap = false;
};
void embed_layers_cuda(const EmbedLayersArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
