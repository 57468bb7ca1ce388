#include "model/decoder_layer.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/linear.h"
#include "model/rope_table.h"
#include "model/scratch.h"

namespace w4q::model {
namespace {

using kernels::LinearWeight;

/// Rows that pass through the MLP together, so that a long prompt does not hold its wide activations all at once.
constexpr int64_t mlp_rows = 1024;

template <class... Weights>
void observe_input(const Observer* observer, MatrixView<const float> input, const Weights&... weights) {
  if (!observer || !observer->linear_input) return;
  const std::array<std::string_view, sizeof...(weights)> names = {weights.name...};
  observer->linear_input(names, input);
}

}  // namespace

void embed(const LinearWeight& embeddings, std::span<const int32_t> ids, MatrixView<float> out) {
  parallel_for(out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = ids[static_cast<size_t>(r)];
      kernels::decode_rows(embeddings, id, id + 1, {out.row(r), 1, out.cols});
    }
  });
}

struct LayerDecoder::Impl {
  Impl(const ModelConfig& config_, DType rope_frequencies)
      : config(config_),
        eps(static_cast<float>(config.rms_norm_eps)),
        rope(config.rope, config.head_dim, rope_frequencies) {}

  void attention_block(const LayerWeights& weights, int64_t layer, const kernels::KeyValueCache& cache,
                       MatrixView<float> x, const Observer* observer);
  void mlp_block(const LayerWeights& weights, MatrixView<float> all, const Observer* observer);
  void multiply(const LinearWeight& weight, MatrixView<const float> x, MatrixView<float> y) const {
    if (int8_activations && kernels::takes_int8_activations(weight)) return kernels::linear_int8(weight, x, y);
    kernels::linear(weight, x, y);
  }

  const ModelConfig& config;
  const float eps;
  const RopeTable rope;
  int64_t position = 0;
  bool int8_activations = false;
  Floats normed, queries, new_keys, new_values, attended, projected, gate, up, cosine, sine;
  MatrixView<float> cosines, sines;  // of the positions that were set
};

void LayerDecoder::Impl::attention_block(const LayerWeights& weights, int64_t layer,
                                         const kernels::KeyValueCache& cache, MatrixView<float> x,
                                         const Observer* observer) {
  const auto input = normed.matrix(x.rows, x.cols);
  kernels::rms_norm(x, weights.input_norm, eps, input);
  observe_input(observer, input, weights.q, weights.k, weights.v);
  const auto q = queries.matrix(x.rows, weights.q.n), k = new_keys.matrix(x.rows, weights.k.n);
  const auto v = new_values.matrix(x.rows, weights.v.n);
  multiply(weights.q, input, q);
  multiply(weights.k, input, k);
  multiply(weights.v, input, v);
  if (config.qk_norm) {
    kernels::rms_norm_heads(q, weights.q_norm, eps);
    kernels::rms_norm_heads(k, weights.k_norm, eps);
  }
  kernels::rotate_heads(q, config.head_dim, cosines, sines);
  kernels::rotate_heads(k, config.head_dim, cosines, sines);
  kernels::append(cache, position, k, v);

  const auto mixed = attended.matrix(x.rows, q.cols);
  kernels::attention(q, cache, position, config.sliding_window[static_cast<size_t>(layer)], mixed);
  observe_input(observer, mixed, weights.o);
  const auto output = projected.matrix(x.rows, x.cols);
  multiply(weights.o, mixed, output);
  kernels::add_rows(x, output);
}

void LayerDecoder::Impl::mlp_block(const LayerWeights& weights, MatrixView<float> all, const Observer* observer) {
  for (int64_t begin = 0; begin < all.rows; begin += mlp_rows) {
    const MatrixView<float> x(all.row(begin), std::min(mlp_rows, all.rows - begin), all.cols, all.stride);
    const auto input = normed.matrix(x.rows, x.cols), output = projected.matrix(x.rows, x.cols);
    const auto gated = gate.matrix(x.rows, weights.gate.n), ups = up.matrix(x.rows, weights.up.n);
    kernels::rms_norm(x, weights.post_attention_norm, eps, input);
    observe_input(observer, input, weights.gate, weights.up);
    multiply(weights.gate, input, gated);
    multiply(weights.up, input, ups);
    kernels::silu_multiply(gated, ups);
    observe_input(observer, gated, weights.down);
    multiply(weights.down, gated, output);
    kernels::add_rows(x, output);
  }
}

LayerDecoder::LayerDecoder(const ModelConfig& config, DType rope_frequencies)
    : impl_(std::make_unique<Impl>(config, rope_frequencies)) {}
LayerDecoder::~LayerDecoder() = default;
LayerDecoder::LayerDecoder(LayerDecoder&&) noexcept = default;

void LayerDecoder::set_positions(int64_t first, int64_t rows) {
  Impl& decoder = *impl_;
  decoder.position = first;
  decoder.cosines = decoder.cosine.matrix(rows, decoder.rope.pairs());
  decoder.sines = decoder.sine.matrix(rows, decoder.rope.pairs());
  decoder.rope.fill(first, decoder.cosines, decoder.sines);
}

void LayerDecoder::set_int8_activations(bool on) noexcept { impl_->int8_activations = on; }

void LayerDecoder::run(const LayerWeights& weights, int64_t layer, const kernels::KeyValueCache& cache,
                       MatrixView<float> x, const Observer* observer) {
  const bool fits = x.cols == impl_->config.hidden_size && x.rows == impl_->cosines.rows && layer >= 0 &&
                    layer < impl_->config.layers;
  ensure(fits, "a decoder layer got hidden states of another shape than was set");
  impl_->attention_block(weights, layer, cache, x, observer);
  impl_->mlp_block(weights, x, observer);
}

}  // namespace w4q::model
