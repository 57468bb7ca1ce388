// What happens between the products of a mixture of experts on the GPU: which experts a row goes through, rows on their
// way there and back. The definition is model/router.h; sums are added in a fixed order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/stream.h"
#include "kernels/frame/route.h"

namespace w4q::kernels {

void route_cuda(const RouteArgs& args, const device::Stream& stream);

/// out[i] = x[rows[i]], f16 rows of `cols`.
void gather_rows_cuda(const __half* x, const int32_t* rows, int64_t count, int64_t cols, __half* out,
                      const device::Stream& stream);
/// y[r] += Σ shares[r][p] · x[slots[r][p]] + sigmoid(gate[r]) · shared[r], of one row or more.
struct CombineArgs {
  const float* x = nullptr;        ///< [rows × places × cols], or null: there are none
  const int32_t* slots = nullptr;  ///< [rows × places]; null: they stand in their order
  const float* shares = nullptr;
  int places = 0;
  const float* shared = nullptr;  ///< [rows × cols], or null
  const float* gate = nullptr;    ///< [rows], `gate_stride` apart; null: all of `shared`
  int64_t gate_stride = 0;
  int64_t rows = 0, cols = 0;
  float* y = nullptr;  ///< [rows × cols]
  bool overlap = false;
};
void combine_cuda(const CombineArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
