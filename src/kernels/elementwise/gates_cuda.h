// What gated MLPs and gated attention do to products, on the GPU: the twin of gates.h. f16 out, within its range.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/stream.h"
#include "kernels/elementwise/gates.h"

namespace w4q::kernels {

/// How gates and ups stand in a row of their products.
enum class GateColumns {
  halves,   ///< all gates, then all ups
  in_turn,  ///< one gate, one up
  turns,    ///< gate_up_turn of each (linear_fusion.h)
};

/// out[rows × inner] = activation(gate) · up; rows of `both` are f32, 2 · inner wide.
void gate_multiply_cuda(const Gating& gating, const float* both, int64_t rows, int64_t inner, GateColumns columns,
                        __half* out, bool overlap, const device::Stream& stream);

/// Of gated attention: rows of `products` are [heads][query, gate][head_dim], then whatever follows. `qkv` gets queries
/// and what follows, side by side; `gates` [rows × heads · head_dim].
struct SplitGatesArgs {
  const float* products = nullptr;
  int64_t rows = 0;
  int64_t heads = 0, head_dim = 0;
  int64_t behind = 0;  ///< columns that follow
  float* qkv = nullptr;
  float* gates = nullptr;
  bool overlap = false;
};
void split_gates_cuda(const SplitGatesArgs& args, const device::Stream& stream);

/// x *= 1 / (1 + e^−gate).
void sigmoid_multiply_cuda(__half* x, const float* gates, int64_t count, bool overlap, const device::Stream& stream);

}  // namespace w4q::kernels
