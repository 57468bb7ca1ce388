// Causal attention over a cache of keys and values, with grouped query heads and an optional sliding window.
#pragma once

#include <cstdint>
#include <span>

#include "core/views.h"

namespace w4q::kernels {

/// The keys and values of one layer, each [kv_heads][capacity][head_dim], in the owner's memory.
struct KeyValueCache {
  float* keys = nullptr;
  float* values = nullptr;
  int64_t kv_heads = 0;
  int64_t capacity = 0;
  int64_t head_dim = 0;
};

/// Stores the keys and values of positions [first, first + rows), one row [kv_heads · head_dim] each. Throws internal
/// when they do not fit.
void append(const KeyValueCache& cache, int64_t first, MatrixView<const float> keys, MatrixView<const float> values);

struct AttentionOptions {
  int64_t window = 0;   ///< 0: all positions are seen
  double scale = 0;     ///< of logits; 0: 1/√head_dim
  double soft_cap = 0;  ///< c: logits become c · tanh(logits / c); 0: they stay
  /// One logit for each query head that takes its share of the softmax and adds no value; empty: none.
  std::span<const float> sinks = {};
};

/// out = softmax(q · Kᵀ · scale) · V for each query head; row r of `queries` [m × heads · head_dim] stands at position
/// first + r, and positions up to first + m − 1 are in the cache. Query head h reads key head h / (heads / kv_heads).
/// Position p sees keys p − window + 1 … p, all of 0 … p when `window` is 0. Softmax in fp32, online over blocks of keys:
/// no more than one block of scores exists per thread (class E2). Parallel over heads and blocks of queries; `out`
/// [m × heads · head_dim] must not overlap `queries`.
void attention(MatrixView<const float> queries, const KeyValueCache& cache, int64_t first,
               const AttentionOptions& options, MatrixView<float> out);

}  // namespace w4q::kernels
