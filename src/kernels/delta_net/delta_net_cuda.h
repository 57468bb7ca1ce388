// The gated delta net on the GPU: the twin of delta_net.h, in fp32. A single row: a launch for the convolution, one for
// the rule with its gated norm. Several: what depends on one row alone is done for all at once before and after the rule,
// in which a warp follows the sequence with eight columns of a head's state in its registers; many: chunks (chunk_cuda.h).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/stream.h"
#include "kernels/delta_net/delta_net.h"

namespace w4q::kernels {

/// How the products of a delta net stand in a row.
enum class DeltaOrder {
  parts,      ///< queries, keys, values; gates; betas; decays
  key_heads,  ///< per key head queries, keys, values, gates; then per key head betas, decays
};

struct DeltaNetArgs {
  DeltaShape shape;  ///< heads of up to 256 channels, key_dim a multiple of 4
  DeltaOrder order = DeltaOrder::parts;
  int64_t rows = 0;
  const float* products = nullptr;  ///< [rows], `stride` apart: what the projections made
  int64_t stride = 0;
  const float* convolution = nullptr;  ///< [channels][taps]
  const float* rate = nullptr;         ///< [value_heads]: A_log
  const float* bias = nullptr;         ///< [value_heads]: dt_bias
  const float* norm = nullptr;         ///< [value_dim]
  float eps = 0;
  DeltaMemory memory;        ///< of the sequence
  bool begins = false;       ///< the sequence begins here: the memory is zeros, whatever it holds
  float* scratch = nullptr;  ///< [rows × delta_scratch(shape)]
  __half* out = nullptr;     ///< [rows × values]: norm(state · q) · silu(gate)
  bool overlap = false;
};
/// Rows that the rule takes together where there are many.
inline constexpr int delta_chunk = 64;
/// Floats of scratch for a row: convolved channels, two numbers a value head, outputs before their norm, and two f16 for
/// each row of its chunk.
inline int64_t delta_scratch(const DeltaShape& shape) {
  return shape.channels() + 2 * shape.value_heads + shape.values() + delta_chunk * shape.value_heads;
}
/// Throws internal for shapes that the kernel does not take (takes_delta_net).
void delta_net_cuda(const DeltaNetArgs& args, const device::Stream& stream);
bool takes_delta_net(const DeltaShape& shape) noexcept;

}  // namespace w4q::kernels
