// The way back through causal attention.
#pragma once

#include "core/views.h"
#include "kernels/attention/attention.h"

namespace w4q::kernels {

/// A sequence from position 0 on, or what belongs to it: queries [m × heads · head_dim], keys and values
/// [m × kv_heads · head_dim].
template <class T>
struct AttentionRows {
  MatrixView<T> queries, keys, values;
};

/// From `gradient` of a loss by `out`, which attention() made of `rows`, to those by queries, keys and values. No more
/// than two blocks of scores exist per thread. Parallel over heads and blocks of queries, then of keys; the result does
/// not depend on the thread count (class E2). Throws internal when the shapes do not fit.
void attention_gradient(const AttentionRows<const float>& rows, int64_t head_dim, const AttentionOptions& options,
                        MatrixView<const float> out, MatrixView<const float> gradient, const AttentionRows<float>& by);

}  // namespace w4q::kernels
