#include "model/decoder.h"

#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/linear.h"
#include "model/int8_activations.h"
#include "model/scratch.h"

namespace w4q::model {

void check_ids(std::span<const int32_t> ids, int64_t position, int64_t capacity, int64_t vocab_size) {
  if (ids.empty()) throw Error(ErrorCode::bad_argument, "no tokens to decode");
  if (static_cast<int64_t>(ids.size()) > capacity - position) {
    throw Error(ErrorCode::bad_argument,
                concat(ids.size(), " tokens after ", position, " do not fit a context of ", capacity, " positions"));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    throw Error(ErrorCode::bad_argument,
                concat("token ", i, " has id ", ids[i], ", the vocabulary ends at ", vocab_size - 1))
        .hint("were the ids made with another tokenizer?");
  }
}

struct Decoder::Impl {
  Impl(const Model& model_, int64_t capacity_, DType rope_frequencies, bool int8);

  kernels::KeyValueCache cache(size_t layer) const;

  const Model& model;
  const ModelConfig& config;
  const int64_t capacity;
  const bool int8_activations;
  LayerDecoder runner;
  int64_t position = 0;
  std::vector<Floats> keys, values;  // per layer, [kv_heads][capacity][head_dim]
  Floats hidden;
};

Decoder::Impl::Impl(const Model& model_, int64_t capacity_, DType rope_frequencies, bool int8)
    : model(model_),
      config(model_.config()),
      capacity(capacity_),
      int8_activations(int8),
      runner(config, rope_frequencies) {
  if (int8_activations) check_int8_activations(model);
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

kernels::KeyValueCache Decoder::Impl::cache(size_t layer) const {
  return {keys[layer].data(), values[layer].data(), config.kv_heads, capacity, config.head_dim};
}

Decoder::Decoder(const Model& model, int64_t capacity, DType rope_frequencies, bool int8_activations)
    : impl_(std::make_unique<Impl>(model, capacity, rope_frequencies, int8_activations)) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;

void Decoder::reset() noexcept { impl_->position = 0; }

int64_t Decoder::position() const noexcept { return impl_->position; }

MatrixView<const float> Decoder::forward(std::span<const int32_t> ids, const Observer* observer) {
  Impl& decoder = *impl_;
  const ModelConfig& config = decoder.config;
  check_ids(ids, decoder.position, decoder.capacity, config.vocab_size);
  const auto rows = static_cast<int64_t>(ids.size());
  const auto x = decoder.hidden.matrix(rows, config.hidden_size);
  const auto observe = [&](int64_t index) {
    if (observer && observer->hidden) observer->hidden(index, x);
  };
  decoder.runner.set_positions(decoder.position, rows);
  decoder.runner.set_int8_activations(decoder.int8_activations && rows >= kernels::least_int8_rows);
  embed(decoder.model.embeddings(), ids, x);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    observe(layer);
    const auto index = static_cast<size_t>(layer);
    decoder.runner.run(decoder.model.layers()[index], decoder.cache(index), x, observer);
  }
  kernels::rms_norm(x, decoder.model.final_norm(), static_cast<float>(config.rms_norm_eps), x);
  observe(config.layers);
  decoder.position += rows;
  return x;
}

void Decoder::logits(MatrixView<const float> hidden, MatrixView<float> out) const {
  const kernels::LinearWeight& head = impl_->model.head();
  if (hidden.cols != head.k || out.cols != head.n || hidden.rows != out.rows) {
    throw Error(ErrorCode::bad_argument, "logits: shapes differ")
        .detail(concat("hidden ", shape_text({hidden.rows, hidden.cols}), ", logits ", shape_text({out.rows, out.cols}),
                       ", head ", shape_text({head.n, head.k})));
  }
  kernels::linear(head, hidden, out);
}

}  // namespace w4q::model
