#include "model/decoder.h"

#include <cmath>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/linear.h"
#include "model/int8_activations.h"
#include "model/layer_memory.h"
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

  const Model& model;
  const ModelConfig& config;
  const int64_t capacity;
  const bool int8_activations;
  LayerDecoder runner;
  MatrixView<float> begin(std::span<const int32_t> ids);
  void run_layers(MatrixView<float> x, const Observer* observer);
  void end(MatrixView<float> x);

  int64_t position = 0;
  LayerMemories memories;
  Floats hidden, layer_embeddings;
};

Decoder::Impl::Impl(const Model& model_, int64_t capacity_, DType rope_frequencies, bool int8)
    : model(model_),
      config(model_.config()),
      capacity(capacity_),
      int8_activations(int8),
      runner(config, rope_frequencies),
      memories(config, capacity) {
  if (int8_activations) check_int8_activations(model);
}

Decoder::Decoder(const Model& model, int64_t capacity, DType rope_frequencies, bool int8_activations)
    : impl_(std::make_unique<Impl>(model, capacity, rope_frequencies, int8_activations)) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;

void Decoder::reset() noexcept { impl_->position = 0; }

int64_t Decoder::position() const noexcept { return impl_->position; }

/// Room for the hidden states of `ids`, which stand behind what was decoded so far.
MatrixView<float> Decoder::Impl::begin(std::span<const int32_t> ids) {
  check_ids(ids, position, capacity, config.known_ids());
  const auto rows = static_cast<int64_t>(ids.size());
  runner.set_positions(position, rows);
  runner.set_int8_activations(int8_activations && rows >= kernels::least_int8_rows);
  return hidden.matrix(rows, config.hidden_size);
}

void Decoder::Impl::run_layers(MatrixView<float> x, const Observer* observer) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (observer && observer->hidden) observer->hidden(layer, x);
    runner.run(model.layers()[static_cast<size_t>(layer)], memories.layer(layer), x, observer);
  }
  position += x.rows;
}

void Decoder::Impl::end(MatrixView<float> x) {
  kernels::rms_norm(x, model.final_norm(), static_cast<float>(config.rms_norm_eps), x);
}

MatrixView<const float> Decoder::forward(std::span<const int32_t> ids, const Observer* observer) {
  Impl& decoder = *impl_;
  ensure(decoder.model.begins() && decoder.model.ends(), "Decoder: layers are missing");
  const auto x = decoder.begin(ids);
  begin_hidden(decoder.model, ids, decoder.runner, decoder.layer_embeddings, x);
  decoder.run_layers(x, observer);
  decoder.end(x);
  if (observer && observer->hidden) observer->hidden(decoder.config.layers, x);
  return x;
}

MatrixView<const float> Decoder::forward(std::span<const int32_t> ids, const LayerStage& stage) {
  Impl& decoder = *impl_;
  const auto x = decoder.begin(ids);
  if (stage.first()) begin_hidden(decoder.model, ids, decoder.runner, decoder.layer_embeddings, x);
  if (!stage.first()) stage.receive(x);
  decoder.run_layers(x, nullptr);
  if (!stage.last()) stage.send(x);
  if (stage.last()) decoder.end(x);
  return x;
}

void finish_logits(const ModelConfig& config, MatrixView<float> logits) {
  if (config.logit_scale == 1 && config.logit_cap == 0) return;
  const auto scale = static_cast<float>(config.logit_scale), cap = static_cast<float>(config.logit_cap);
  parallel_for(logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < logits.cols; ++c) {
        float& value = logits.row(r)[c];
        value *= scale;
        if (cap > 0) value = cap * std::tanh(value / cap);
      }
    }
  });
}

void Decoder::logits(MatrixView<const float> hidden, MatrixView<float> out) const {
  const kernels::LinearWeight& head = impl_->model.head();
  if (hidden.cols != head.k || out.cols != head.n || hidden.rows != out.rows) {
    throw Error(ErrorCode::bad_argument, "logits: shapes differ")
        .detail(concat("hidden ", shape_text({hidden.rows, hidden.cols}), ", logits ", shape_text({out.rows, out.cols}),
                       ", head ", shape_text({head.n, head.k})));
  }
  kernels::linear(head, hidden, out);
  finish_logits(impl_->config, out);
}

}  // namespace w4q::model
