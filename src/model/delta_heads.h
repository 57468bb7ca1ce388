// How the projections of a gated delta net stand in its products: apart, or two of them as one matrix, key head by key
// head: queries, keys, values and gates; betas and decays.
#pragma once

#include <span>

#include "kernels/delta_net/delta_net.h"
#include "model/activations.h"
#include "model/columns.h"

namespace w4q::model {

/// Of m rows: what is convolved [channels], gates [values], betas and decays [value_heads].
struct DeltaProducts {
  MatrixView<float> mixed, gates, betas, decays;
};

/// Calls `move(product of the two, its first column, part, its first column, columns)` for every part of every head.
template <class Move>
void for_each_delta_part(const kernels::DeltaShape& shape, MatrixView<float> mixed_gates,
                         MatrixView<float> betas_decays, const DeltaProducts& parts, const Move& move) {
  const int64_t each = shape.value_heads / shape.key_heads, values = each * shape.value_dim;
  const int64_t stride = 2 * shape.key_dim + 2 * values;
  for (int64_t head = 0; head < shape.key_heads; ++head) {
    const int64_t from = head * stride;
    move(mixed_gates, from, parts.mixed, head * shape.key_dim, shape.key_dim);
    move(mixed_gates, from + shape.key_dim, parts.mixed, shape.keys() + head * shape.key_dim, shape.key_dim);
    move(mixed_gates, from + 2 * shape.key_dim, parts.mixed, 2 * shape.keys() + head * values, values);
    move(mixed_gates, from + 2 * shape.key_dim + values, parts.gates, head * values, values);
    move(betas_decays, 2 * head * each, parts.betas, head * each, each);
    move(betas_decays, (2 * head + 1) * each, parts.decays, head * each, each);
  }
}

/// Products become what the rule takes: betas in (0, 1), and logarithms of decays by each head's `rate` and `bias`.
inline void activate_delta(std::span<const float> rate, std::span<const float> bias, MatrixView<float> betas,
                           MatrixView<float> decays) {
  for (int64_t r = 0; r < betas.rows; ++r) {
    for (int64_t h = 0; h < betas.cols; ++h) {
      const auto head = static_cast<size_t>(h);
      betas.row(r)[h] = logistic(betas.row(r)[h]);
      decays.row(r)[h] = -std::exp(rate[head]) * softplus(decays.row(r)[h] + bias[head]);
    }
  }
}

inline void part_delta_heads(const kernels::DeltaShape& shape, MatrixView<float> mixed_gates,
                             MatrixView<float> betas_decays, const DeltaProducts& to) {
  for_each_delta_part(shape, mixed_gates, betas_decays, to,
                      [](MatrixView<float> both, int64_t from, MatrixView<float> part, int64_t at, int64_t count) {
                        pick(both, from, 1, columns(part, at, count));
                      });
}

inline void join_delta_heads(const kernels::DeltaShape& shape, const DeltaProducts& from, MatrixView<float> mixed_gates,
                             MatrixView<float> betas_decays) {
  for_each_delta_part(shape, mixed_gates, betas_decays, from,
                      [](MatrixView<float> both, int64_t to, MatrixView<float> part, int64_t at, int64_t count) {
                        place(columns(part, at, count), both, to, 1);
                      });
}

}  // namespace w4q::model
