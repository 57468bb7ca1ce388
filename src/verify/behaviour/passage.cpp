#include "verify/behaviour/passage.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/linear.h"
#include "kernels/sampling/logits.h"
#include "model/columns.h"
#include "model/decoder.h"
#include "model/loss_gradient.h"

namespace w4q::verify::behaviour {

using model::Block;
using model::BlockKind;
using model::LayerWeights;
using model::NormRole;

namespace {

MatrixView<const float> first_rows(const Activations& of, int64_t rows) { return {of.values.data(), rows, of.cols}; }

}  // namespace

Activations::Activations(MatrixView<const float> from) : Activations(from.rows, from.cols) {
  model::pick(from, 0, 1, view());
}

Reader::Reader(const model::Model& model)
    : config(model.config()), embeddings(model.embeddings()), head(model.head()), final_norm(model.final_norm()) {
  for (size_t layer = 0; layer < model.layers().size(); ++layer) {
    const LayerWeights& weights = model.layers()[layer];
    for (const Block& block : weights.plan.blocks) {
      places.push_back({static_cast<int64_t>(layer), weights});
      places.back().weights.plan.blocks = {block};
    }
  }
}

std::string_view obstacle_to_passage(const model::ModelConfig& config) {
  if (config.architecture == nullptr) return "its architecture is not known";
  if (config.layer_embedding_size != 0 || !model::obstacle_to_gradients(config).empty()) {
    return "there is no way back through its layers";
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const Block& block : layer_plan(config, layer).blocks) {
      if (block.vector(model::VectorRole::layer_scale) != nullptr) return "its layers scale what they read";
    }
  }
  return {};
}

Passage::Passage(const Reader& reader, std::span<const int32_t> ids)
    : reader_(reader),
      ids_(ids.begin(), ids.end()),
      decoder_(reader.config),
      memories_(model::LayerMemories::one_at_a_time(reader.config, std::ssize(ids))),
      around_(reader.places.size()) {}

void Passage::run_place(const LayerWeights& weights, size_t place, MatrixView<float> x) {
  decoder_.set_positions(0, x.rows);
  decoder_.run(weights, memories_.layer(reader_.places[place].layer), x);
}

void Passage::run() {
  Activations x(std::ssize(ids_), reader_.config.hidden_size);
  model::embed(reader_.config, reader_.embeddings, ids_, x.view());
  for (size_t place = 0; place < around_.size(); ++place) {
    around_[place].before = x;
    around_[place].added = added_by(reader_.places[place].weights, place);
    kernels::add_rows(x.view(), around_[place].added.view());
  }
  losses_ = losses_behind(x);
  last_ = std::move(x);
}

Activations Passage::added_by(const LayerWeights& weights, size_t place) {
  const Activations& before = around_[place].before;
  Activations x = before;
  run_place(weights, place, x.view());
  for (size_t i = 0; i < x.values.size(); ++i) x.values[i] -= before.values[i];
  return x;
}

void Passage::back() {
  const model::LossGradient end{reader_.config, reader_.final_norm, reader_.head};
  Activations gradient = last_;
  end.run(ids_, gradient.view());
  model::LayerGradient way_back(reader_.config);
  for (size_t place = around_.size(); place-- > 0;) {
    Around& around = around_[place];
    const LayerWeights& weights = reader_.places[place].weights;
    const Block& block = reader_.places[place].block();
    around.by_added = gradient;
    const model::PlannedLinear& last = block.groups.back().linears.front();
    const auto keep = [&](const model::PlannedLinear& linear, MatrixView<const float> input,
                          MatrixView<const float> by_output) {
      if (block.kind == BlockKind::mixture || linear.position != last.position) return;
      around.inner = Activations(input);
      around.by_inner = Activations(input.rows, input.cols);
      kernels::linear_gradient(weights.linears[last.position], by_output, around.by_inner.view());
    };
    way_back.run(weights, around.before.view(), gradient.view(), keep);
  }
}

Activations Passage::added_from(size_t place, const Activations& inner) const {
  const Reader::Place& of = reader_.places[place];
  const kernels::LinearWeight& last = of.weights.linears[of.block().groups.back().linears.front().position];
  Activations added(inner.rows, last.n);
  kernels::linear(last, inner.view(), added.view());
  if (const auto* norm = of.block().norm(NormRole::output)) {
    const auto eps = static_cast<float>(reader_.config.rms_norm_eps);
    kernels::rms_norm(added.view(), of.weights.norms[norm->position], eps, added.view());
  }
  model::scale_rows(added.view(), of.block().output_scale);
  return added;
}

Losses Passage::losses_with(size_t place, const Activations& added, int64_t tokens) {
  const int64_t rows = std::min(tokens, added.rows);
  Activations x(first_rows(around_[place].before, rows));
  kernels::add_rows(x.view(), first_rows(added, rows));
  for (size_t next = place + 1; next < around_.size(); ++next) run_place(reader_.places[next].weights, next, x.view());
  return losses_behind(x);
}

Losses Passage::losses_behind(const Activations& hidden) const {
  Activations normed = hidden;
  const auto eps = static_cast<float>(reader_.config.rms_norm_eps);
  kernels::rms_norm(hidden.view(), reader_.final_norm, eps, normed.view());
  Activations logits(hidden.rows, reader_.head.n);
  kernels::linear(reader_.head, normed.view(), logits.view());
  model::finish_logits(reader_.config, logits.view());
  Losses losses(static_cast<size_t>(hidden.rows - 1));
  parallel_for(hidden.rows - 1, 4, [&](int64_t begin, int64_t end) {
    for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
      const std::span<const float> values(logits.view().row(static_cast<int64_t>(row)),
                                          static_cast<size_t>(logits.cols));
      losses[row] = -kernels::log_softmax_at(values, ids_[row + 1]);
    }
  });
  return losses;
}

double mean_of(const Losses& losses) {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

Change change_of(const Losses& from, const Losses& to) {
  const auto count = static_cast<double>(to.size());
  double sum = 0, squares = 0;
  for (size_t i = 0; i < to.size(); ++i) {
    sum += to[i] - from[i];
    squares += (to[i] - from[i]) * (to[i] - from[i]);
  }
  const double mean = sum / count, variance = std::max(squares / count - mean * mean, 1e-12);
  return {mean, mean / std::sqrt(variance / count)};
}

}  // namespace w4q::verify::behaviour
