#include "model/decoder.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "model/rope_table.h"

namespace w4q::model {
namespace {

using kernels::LinearWeight;

/// Rows that pass through the MLP together, so that a long prompt does not hold its wide activations all at once.
constexpr int64_t mlp_rows = 1024;

/// fp32 memory that grows and is not initialised: a cache of many positions costs only what is used.
class Floats {
 public:
  MatrixView<float> matrix(int64_t rows, int64_t cols) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    if (count > size_) {
      data_ = std::make_unique_for_overwrite<float[]>(count);
      size_ = count;
    }
    return {data_.get(), rows, cols};
  }
  float* data() const noexcept { return data_.get(); }

 private:
  std::unique_ptr<float[]> data_;
  size_t size_ = 0;
};

MatrixView<float> rows_of(MatrixView<float> matrix, int64_t begin, int64_t count) {
  return {matrix.row(begin), count, matrix.cols, matrix.stride};
}

void observe_input(const Observer* observer, const LinearWeight& weight, MatrixView<const float> input) {
  if (observer && observer->linear_input) observer->linear_input(weight.name, input);
}

}  // namespace

struct Decoder::Impl {
  Impl(const Model& model_, int64_t capacity_, DType rope_frequencies);

  void check(std::span<const int32_t> ids) const;
  void embed(std::span<const int32_t> ids, MatrixView<float> out) const;
  void attention_block(size_t layer, MatrixView<float> hidden, const Observer* observer);
  void mlp_block(const LayerWeights& weights, MatrixView<float> hidden, const Observer* observer);
  kernels::KeyValueCache cache(size_t layer) const;

  const Model& model;
  const ModelConfig& config;
  const int64_t capacity;
  const RopeTable rope;
  int64_t position = 0;
  std::vector<Floats> keys, values;  // per layer, [kv_heads][capacity][head_dim]
  Floats hidden, normed, queries, new_keys, new_values, attended, projected, gate, up;
  Floats cosine, sine;
  MatrixView<float> cosines, sines;  // of the positions of the current call
};

Decoder::Impl::Impl(const Model& model_, int64_t capacity_, DType rope_frequencies)
    : model(model_),
      config(model_.config()),
      capacity(capacity_),
      rope(config.rope, config.head_dim, rope_frequencies) {
  const int64_t width = config.kv_heads * config.head_dim;
  constexpr auto most = std::numeric_limits<int64_t>::max() / int64_t{2 * sizeof(float)};
  if (capacity < 1 || capacity > most / width) {
    throw Error(ErrorCode::bad_argument, concat("a context of ", capacity, " positions cannot be held"));
  }
  keys.resize(static_cast<size_t>(config.layers));
  values.resize(static_cast<size_t>(config.layers));
  try {
    for (auto* planes : {&keys, &values}) {
      for (auto& plane : *planes) plane.matrix(capacity, width);
    }
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::bad_argument, concat("no memory for the keys and values of ", capacity, " positions"))
        .detail(concat("they take ", human_bytes(2 * capacity * width * int64_t{sizeof(float)}), " in each of ",
                       config.layers, " layers"))
        .hint("ask for a shorter context");
  }
}

void Decoder::Impl::check(std::span<const int32_t> ids) const {
  if (ids.empty()) throw Error(ErrorCode::bad_argument, "no tokens to decode");
  if (static_cast<int64_t>(ids.size()) > capacity - position) {
    throw Error(ErrorCode::bad_argument,
                concat(ids.size(), " tokens after ", position, " do not fit a context of ", capacity, " positions"));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < config.vocab_size) continue;
    throw Error(ErrorCode::bad_argument,
                concat("token ", i, " has id ", ids[i], ", the vocabulary ends at ", config.vocab_size - 1))
        .hint("were the ids made with another tokenizer?");
  }
}

void Decoder::Impl::embed(std::span<const int32_t> ids, MatrixView<float> out) const {
  parallel_for(out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = ids[static_cast<size_t>(r)];
      kernels::decode_rows(model.embeddings(), id, id + 1, rows_of(out, r, 1));
    }
  });
}

kernels::KeyValueCache Decoder::Impl::cache(size_t layer) const {
  return {keys[layer].data(), values[layer].data(), config.kv_heads, capacity, config.head_dim};
}

void Decoder::Impl::attention_block(size_t layer, MatrixView<float> x, const Observer* observer) {
  const LayerWeights& weights = model.layers()[layer];
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const auto input = normed.matrix(x.rows, x.cols);
  kernels::rms_norm(x, weights.input_norm, eps, input);
  const auto q = queries.matrix(x.rows, weights.q.n), k = new_keys.matrix(x.rows, weights.k.n);
  const auto v = new_values.matrix(x.rows, weights.v.n);
  for (const auto& [weight, output] : {std::pair(&weights.q, q), {&weights.k, k}, {&weights.v, v}}) {
    observe_input(observer, *weight, input);
    kernels::linear(*weight, input, output);
  }
  if (config.qk_norm) {
    kernels::rms_norm_heads(q, weights.q_norm, eps);
    kernels::rms_norm_heads(k, weights.k_norm, eps);
  }
  kernels::rotate_heads(q, config.head_dim, cosines, sines);
  kernels::rotate_heads(k, config.head_dim, cosines, sines);
  kernels::append(cache(layer), position, k, v);

  const auto mixed = attended.matrix(x.rows, q.cols);
  kernels::attention(q, cache(layer), position, config.sliding_window[layer], mixed);
  observe_input(observer, weights.o, mixed);
  const auto output = projected.matrix(x.rows, x.cols);
  kernels::linear(weights.o, mixed, output);
  kernels::add_rows(x, output);
}

void Decoder::Impl::mlp_block(const LayerWeights& weights, MatrixView<float> all, const Observer* observer) {
  for (int64_t begin = 0; begin < all.rows; begin += mlp_rows) {
    const auto x = rows_of(all, begin, std::min(mlp_rows, all.rows - begin));
    const auto input = normed.matrix(x.rows, x.cols), output = projected.matrix(x.rows, x.cols);
    const auto gated = gate.matrix(x.rows, weights.gate.n), ups = up.matrix(x.rows, weights.up.n);
    kernels::rms_norm(x, weights.post_attention_norm, static_cast<float>(config.rms_norm_eps), input);
    observe_input(observer, weights.gate, input);
    kernels::linear(weights.gate, input, gated);
    observe_input(observer, weights.up, input);
    kernels::linear(weights.up, input, ups);
    kernels::silu_multiply(gated, ups);
    observe_input(observer, weights.down, gated);
    kernels::linear(weights.down, gated, output);
    kernels::add_rows(x, output);
  }
}

Decoder::Decoder(const Model& model, int64_t capacity, DType rope_frequencies)
    : impl_(std::make_unique<Impl>(model, capacity, rope_frequencies)) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;

void Decoder::reset() noexcept { impl_->position = 0; }

int64_t Decoder::position() const noexcept { return impl_->position; }

MatrixView<const float> Decoder::forward(std::span<const int32_t> ids, const Observer* observer) {
  Impl& decoder = *impl_;
  decoder.check(ids);
  const ModelConfig& config = decoder.config;
  const auto rows = static_cast<int64_t>(ids.size());
  const auto x = decoder.hidden.matrix(rows, config.hidden_size);
  const auto observe = [&](int64_t index) {
    if (observer && observer->hidden) observer->hidden(index, x);
  };
  decoder.cosines = decoder.cosine.matrix(rows, decoder.rope.pairs());
  decoder.sines = decoder.sine.matrix(rows, decoder.rope.pairs());
  decoder.rope.fill(decoder.position, decoder.cosines, decoder.sines);
  decoder.embed(ids, x);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    observe(layer);
    const auto index = static_cast<size_t>(layer);
    decoder.attention_block(index, x, observer);
    decoder.mlp_block(decoder.model.layers()[index], x, observer);
  }
  kernels::rms_norm(x, decoder.model.final_norm(), static_cast<float>(config.rms_norm_eps), x);
  observe(config.layers);
  decoder.position += rows;
  return x;
}

void Decoder::logits(MatrixView<const float> hidden, MatrixView<float> out) const {
  const LinearWeight& head = impl_->model.head();
  if (hidden.cols != head.k || out.cols != head.n || hidden.rows != out.rows) {
    throw Error(ErrorCode::bad_argument, "logits: shapes differ")
        .detail(concat("hidden ", shape_text({hidden.rows, hidden.cols}), ", logits ", shape_text({out.rows, out.cols}),
                       ", head ", shape_text({head.n, head.k})));
  }
  kernels::linear(head, hidden, out);
}

}  // namespace w4q::model
