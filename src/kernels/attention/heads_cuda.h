// Heads of q, k and v that are not as decode_attention_cuda and rotate_and_store_cuda take them: norms over all heads or of
// values, neighbours that turn together, angles of another table, values that are keys, queries with a scale of their own, values that are cut off.
#pragma once

#include "kernels/attention/attention_cuda.h"

namespace w4q::kernels {

/// A row is a token. What it lacks of keys or values stays as it is in `out`.
struct ArrangeHeadsArgs {
  const float* products = nullptr;  ///< [rows], `stride` apart: heads of q first
  int64_t rows = 0, stride = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int64_t keys_at = -1, values_at = -1;  ///< the columns at which heads of k and v begin; −1: there are none
  HeadRotation rotation;     ///< norms are [heads · head_dim] where they are `whole`; no pairs: nothing turns
  bool neighbours = false;   ///< channels 2i and 2i + 1 turn together
  bool whole_norms = false;  ///< the mean of squares is that of all heads
  bool value_norm = false;   ///< values are divided by their root mean square, head by head
  float clip = 0;            ///< what is normed is cut off at ± this; 0: it is not
  float query_scale = 1;
  /// Queries are multiplied by 1 + temperature · ln(1 + ⌊position / temperature_length⌋).
  float temperature = 0;
  int64_t temperature_length = 1;
  int64_t first = 0;  ///< the position of row 0, whose angles are row 0 of the tables
  const int32_t* position =
      nullptr;           ///< in GPU memory: added to it, and to the row of the tables unless `single`; or null
  float* out = nullptr;  ///< [rows][heads + 2 · kv_heads][head_dim]
  const PagedLayer* store = nullptr;  ///< keys and values also go here; null: they do not
  bool overlap = false;
};
void arrange_heads_cuda(const ArrangeHeadsArgs& args, const device::Stream& stream);

/// Attention as it is written down, for what the fast kernels leave: soft caps, heads of up to 512 values, a cache that
/// another layer fills. A block for each head of a row; fp32 throughout.
struct PlainAttentionArgs {
  QkvRows qkv;       ///< queries as they are multiplied with keys
  PagedLayer layer;  ///< f16; the keys and values of all rows are stored
  int64_t first = 0;
  const int32_t* position = nullptr;  ///< as in ArrangeHeadsArgs
  int64_t window = 0;
  float scale = 1;               ///< of scores
  float soft_cap = 0;            ///< c: scores become c · tanh(score / c); 0: they stay
  const float* sinks = nullptr;  ///< [heads], or null
  __half* out = nullptr;         ///< [rows][heads · head_dim]
  bool overlap = false;
};
void plain_attention_cuda(const PlainAttentionArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
