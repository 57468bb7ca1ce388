// How rows of a mixture choose their experts, from the logits of its router. The definition is model/router.h.
#pragma once

#include <cstdint>

namespace w4q::kernels {

struct RouteArgs {
  float* logits = nullptr;  ///< [rows], `stride` apart
  /// Of one row, and a choice that a product makes: logits are the sums of these parts [count × stride] without the bias,
  /// and are written. Null: they stand.
  const float* parts = nullptr;
  int part_count = 0;
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
  /// Of one row: behind the chosen stands weight `experts`, with the sigmoid of the logit behind those of experts as its
  /// share where `stride` has room for one, else all of it.
  bool joined = false;
  int32_t* places = nullptr;  ///< [rows × chosen], best first, and what is joined
  float* shares = nullptr;    ///< likewise
  bool overlap = false;
};
inline constexpr int most_routed_experts = 1024, most_routed_places = 32;
/// Of which a product chooses by itself: each has a thread of a block.
inline constexpr int most_experts_chosen_by_product = 384;

/// Rows that go through one of many weights: first … first + count − 1 of those that have been sorted.
struct RowGroup {
  int32_t weight = 0, first = 0, count = 0;
};
inline constexpr int most_group_rows = 64;

}  // namespace w4q::kernels
