#include "kernels/delta_net/delta_net.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace w4q::kernels {
namespace {

constexpr float norm_eps = 1e-6f;
/// Channels of a convolution that are worth waking a thread for.
constexpr int64_t channel_block = 256;

/// x / √(Σ x² + eps) · factor.
void l2_normed(const float* x, int64_t count, float factor, float* y) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum + norm_eps);
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * scale * factor;
}

/// One head at one position: the state moves on and is read.
void step(const DeltaShape& shape, const float* query, const float* key, const float* value, float beta, float decay,
          float* state, float* seen, float* out) {
  const int64_t width = shape.value_dim;
  std::fill_n(seen, width, 0.0f);
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    float* const row = state + i * width;
    for (int64_t j = 0; j < width; ++j) {
      row[j] *= decay;
      seen[j] += row[j] * key[i];
    }
  }
  for (int64_t j = 0; j < width; ++j) seen[j] = (value[j] - seen[j]) * beta;
  std::fill_n(out, width, 0.0f);
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    float* const row = state + i * width;
    for (int64_t j = 0; j < width; ++j) {
      row[j] += key[i] * seen[j];
      out[j] += row[j] * query[i];
    }
  }
}

}  // namespace

void causal_convolution(const DeltaShape& shape, std::span<const float> weight, float* history, MatrixView<float> x,
                        Activation activation) {
  const int64_t channels = shape.channels(), taps = shape.taps, past = taps - 1;
  ensure(x.cols == channels && static_cast<int64_t>(weight.size()) == channels * taps,
         "causal_convolution: shapes differ");
  parallel_for(channels, channel_block, [&](int64_t begin, int64_t end) {
    std::vector<float> line(static_cast<size_t>(past + x.rows));
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t t = 0; t < past; ++t) line[static_cast<size_t>(t)] = history[t * channels + c];
      for (int64_t r = 0; r < x.rows; ++r) line[static_cast<size_t>(past + r)] = x.row(r)[c];
      const float* const taps_of = weight.data() + c * taps;
      for (int64_t r = 0; r < x.rows; ++r) {
        float sum = 0;
        for (int64_t t = 0; t < taps; ++t) sum += taps_of[t] * line[static_cast<size_t>(r + t)];
        x.row(r)[c] = activation == Activation::silu ? sum / (1.0f + std::exp(-sum))
                                                     : activated_gate({.activation = activation}, sum).value;
      }
      for (int64_t t = 0; t < past; ++t) history[t * channels + c] = line[static_cast<size_t>(x.rows + t)];
    }
  });
}

void delta_rule(const DeltaShape& shape, MatrixView<const float> mixed, MatrixView<const float> beta,
                MatrixView<const float> log_decay, float* state, MatrixView<float> out) {
  const int64_t heads = shape.value_heads;
  ensure(mixed.cols == shape.channels() && beta.cols == heads && log_decay.cols == heads &&
             out.cols == shape.values() && mixed.rows == out.rows && beta.rows == out.rows &&
             log_decay.rows == out.rows,
         "delta_rule: shapes differ");
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> query(static_cast<size_t>(shape.key_dim)), key(query.size());
    std::vector<float> seen(static_cast<size_t>(shape.value_dim));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t from = head / (heads / shape.key_heads) * shape.key_dim;
      float* const memory = state + head * shape.key_dim * shape.value_dim;
      for (int64_t r = 0; r < mixed.rows; ++r) {
        const float* const row = mixed.row(r);
        l2_normed(row + from, shape.key_dim, scale, query.data());
        l2_normed(row + shape.keys() + from, shape.key_dim, 1.0f, key.data());
        step(shape, query.data(), key.data(), row + 2 * shape.keys() + head * shape.value_dim, beta.row(r)[head],
             std::exp(log_decay.row(r)[head]), memory, seen.data(), out.row(r) + head * shape.value_dim);
      }
    }
  });
}

}  // namespace w4q::kernels
