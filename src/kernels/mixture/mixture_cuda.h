// What happens between the products of a mixture of experts on the GPU: which experts a row goes through, rows on their
// way there and back. The definition is model/router.h; sums are added in a fixed order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/stream.h"

namespace w4q::kernels {

struct RouteArgs {
  float* logits = nullptr;  ///< [rows], `stride` apart
  int64_t rows = 0, stride = 0;
  int experts = 0;  ///< up to 1024
  int chosen = 0;   ///< up to 32
  bool sigmoid = false, renormalizes = false;
  float scale = 1;
  int groups = 1, chosen_groups = 1;    ///< up to 32 groups
  const float* correction = nullptr;    ///< [experts], or null
  const float* expert_scale = nullptr;  ///< [experts], or null
  /// Of one row: logits are products, with `bias`, of `cols` inputs that lack what this state says (linear_fusion.h). What
  /// stands behind the experts' logits up to `stride` is completed in place. Null: all are complete.
  const float* input_norm = nullptr;
  const float* bias = nullptr;  ///< [experts], or null
  int64_t cols = 0;
  float eps = 0;
  int32_t* places = nullptr;  ///< [rows × chosen]
  float* shares = nullptr;    ///< [rows × chosen]
  bool overlap = false;
};
inline constexpr int most_routed_experts = 1024, most_routed_places = 32;
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
