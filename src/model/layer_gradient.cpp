#include "model/layer_gradient.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/attention/attention_gradient.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/gates.h"
#include "kernels/linear/linear.h"
#include "model/columns.h"
#include "model/decoder.h"
#include "model/delta_gradient.h"
#include "model/gated_gradient.h"
#include "model/mixture_gradient.h"
#include "model/rope_table.h"
#include "model/scratch.h"

namespace w4q::model {

/// What a block keeps of its way forward for its way back.
struct GradientMemory {
  Floats input, normed, raw_queries, raw_gates, queries, keys, values, gates, mixed, last;
  std::vector<Floats> products;
  GatedMemory mlp;
  MixtureMemory mixture;
  DeltaGradientMemory delta;
};

/// What only one block needs at a time.
struct GradientScratch {
  Floats cached_keys, cached_values, cosine, sine, by_output, by_input, by_stream, by_mixed, by_queries, by_values,
      by_gates;
  std::vector<Floats> by_products;
};

namespace {

void copy_rows(MatrixView<const float> from, MatrixView<float> to) { pick(from, 0, 1, to); }

/// Queries, keys and values of an attention block, and gates of its output; those that are parts of a product, as views.
struct Heads {
  MatrixView<float> queries, keys, values, gates;
};

/// One block of one sequence, forth and back.
class BlockGradient {
 public:
  BlockGradient(const LayerWeights& weights, const Block& block, float eps, int64_t rows, GradientMemory& memory,
                GradientScratch& scratch)
      : weights_(weights), block_(block), eps_(eps), rows_(rows), memory_(memory), scratch_(scratch) {}

  /// x becomes what the block puts out. Where nothing comes `behind`, x stays if that spares a product.
  void forward(MatrixView<float> x, bool behind) {
    copy_rows(x, kept_input());
    if (const auto weight = norm(NormRole::input); !weight.empty()) {
      kernels::rms_norm(x, weight, eps_, memory_.normed.matrix(rows_, x.cols));
    }
    if (block_.kind == BlockKind::attention) {
      multiply(first(), input());
      attend();
    } else if (block_.kind == BlockKind::delta_net) {
      multiply(first(), input());
      delta().forward(memory_.products, mixed());
    } else if (block_.kind == BlockKind::gated_mlp) {
      mlp().forward(input());
    }
    if (!behind && norm(NormRole::output).empty() && block_.kind != BlockKind::mixture) return;
    const auto output = memory_.last.matrix(rows_, x.cols);
    put_out(output);
    const auto added = scratch_.by_output.matrix(rows_, x.cols);
    copy_rows(output, added);
    if (const auto weight = norm(NormRole::output); !weight.empty()) kernels::rms_norm(output, weight, eps_, added);
    scale_rows(added, block_.output_scale);
    kernels::add_rows(x, added);
    if (const auto factor = vector(VectorRole::layer_scale); !factor.empty()) scale_rows(x, double{factor.front()});
  }

  /// By what the block puts out, then by what it takes in.
  void backward(MatrixView<float> gradient, const GradientObserver& observer, const NormObserver& norms) {
    if (const auto factor = vector(VectorRole::layer_scale); !factor.empty()) {
      scale_rows(gradient, double{factor.front()});
    }
    const auto by_output = scratch_.by_output.matrix(rows_, gradient.cols);
    copy_rows(gradient, by_output);
    scale_rows(by_output, block_.output_scale);
    norm_back(NormRole::output, memory_.last.matrix(rows_, gradient.cols), by_output, norms);
    const auto by_input = scratch_.by_input.matrix(rows_, gradient.cols);
    if (block_.kind == BlockKind::mixture) {
      const auto by_stream = scratch_.by_stream.matrix(rows_, gradient.cols);
      mixture().backward(kept_input(), input(), by_output, by_stream, by_input, observer);
      kernels::add_rows(gradient, by_stream);
    } else if (block_.kind == BlockKind::gated_mlp) {
      mlp().backward(input(), by_output, by_input, observer);
    } else {
      if (observer) observer(last(), mixed(), by_output);
      const auto by_mixed = scratch_.by_mixed.matrix(rows_, last().k);
      kernels::linear_gradient(weight_of(last()), by_output, by_mixed);
      make_gradients();
      if (block_.kind == BlockKind::delta_net) {
        delta().backward(by_mixed, scratch_.by_products, norms);
      } else {
        attend_back(by_mixed, norms);
      }
      multiply_back(observer, by_input);
    }
    norm_back(NormRole::input, kept_input(), by_input, norms);
    kernels::add_rows(gradient, by_input);
  }

 private:
  std::span<const float> norm(NormRole role) const {
    const auto* planned = block_.norm(role);
    return planned == nullptr ? std::span<const float>{} : weights_.norms[planned->position];
  }
  /// Where there is no such norm, the gradient stays as it is.
  void norm_back(NormRole role, MatrixView<const float> x, MatrixView<float> gradient,
                 const NormObserver& norms) const {
    const auto* planned = block_.norm(role);
    if (planned == nullptr) return;
    if (norms) norms(*planned, x, gradient);
    kernels::rms_norm_gradient(x, weights_.norms[planned->position], eps_, gradient);
  }
  std::span<const float> vector(VectorRole role) const {
    const auto* planned = block_.vector(role);
    return planned == nullptr ? std::span<const float>{} : weights_.vectors[planned->position];
  }
  const kernels::LinearWeight& weight_of(const PlannedLinear& linear) const {
    return weights_.linears[linear.position];
  }
  const InputGroup& first() const { return block_.groups.front(); }
  const PlannedLinear& last() const { return block_.groups.back().linears.front(); }
  /// What the first group reads, and the last linear.
  MatrixView<float> kept_input() { return memory_.input.matrix(rows_, first().width); }
  MatrixView<float> input() {
    return norm(NormRole::input).empty() ? kept_input() : memory_.normed.matrix(rows_, first().width);
  }
  MatrixView<float> mixed() { return memory_.mixed.matrix(rows_, last().k); }

  GatedGradient mlp() { return {weights_, block_, first(), last(), memory_.mlp}; }
  DeltaGradient delta() { return {weights_, block_, eps_, rows_, memory_.delta}; }
  MixtureGradient mixture() { return {weights_, block_, eps_, memory_.mixture}; }

  /// Before the norm of the output.
  void put_out(MatrixView<float> output) {
    switch (block_.kind) {
      case BlockKind::mixture:
        return copy_rows(mixture().forward(kept_input(), input()), output);
      case BlockKind::gated_mlp:
        return copy_rows(mlp().output(rows_), output);
      default:
        kernels::linear(weight_of(last()), mixed(), output);
    }
  }

  void multiply(const InputGroup& group, MatrixView<const float> x) {
    memory_.products.resize(group.linears.size());
    for (size_t i = 0; i < group.linears.size(); ++i) {
      kernels::linear(weight_of(group.linears[i]), x, memory_.products[i].matrix(rows_, group.linears[i].n));
    }
  }

  MatrixView<float> by_product(size_t index) {
    return scratch_.by_products[index].matrix(rows_, first().linears[index].n);
  }

  void make_gradients() {
    scratch_.by_products.resize(std::max(scratch_.by_products.size(), first().linears.size()));
    for (size_t i = 0; i < first().linears.size(); ++i) by_product(i);
  }

  void multiply_back(const GradientObserver& observer, MatrixView<float> by_input) {
    const auto part = scratch_.by_mixed.matrix(rows_, by_input.cols);
    for (size_t i = 0; i < first().linears.size(); ++i) {
      const PlannedLinear& linear = first().linears[i];
      if (observer) observer(linear, input(), by_product(i));
      kernels::linear_gradient(weight_of(linear), by_product(i), i == 0 ? by_input : part);
      if (i > 0) kernels::add_rows(by_input, part);
    }
  }

  // ---- attention

  const AttentionConfig& attention() const { return block_.attention; }
  int64_t query_width() const { return attention().heads * attention().head_dim; }
  int64_t key_width() const { return attention().kv_heads * attention().head_dim; }

  /// Products, or gradients by them, by what they are of; with gates of the output queries are those of both. Where keys
  /// are values, there are no values.
  Heads heads_of(std::vector<Floats>& products) const {
    Heads heads;
    for (size_t i = 0; i < first().linears.size(); ++i) {
      const auto product = products[i].matrix(rows_, first().linears[i].n);
      switch (first().linears[i].role) {
        case Role::query_key_value:
          heads.queries = columns(product, 0, query_width());
          heads.keys = columns(product, query_width(), key_width());
          heads.values = columns(product, query_width() + key_width(), key_width());
          break;
        case Role::key:
          heads.keys = product;
          break;
        case Role::value:
          heads.values = product;
          break;
        default:
          heads.queries = product;
      }
    }
    return heads;
  }

  /// Before norms and rotation.
  Heads raw_heads() {
    Heads heads = heads_of(memory_.products);
    if (attention().output_gate) {
      const auto both = heads.queries;
      heads.queries = memory_.raw_queries.matrix(rows_, query_width());
      heads.gates = memory_.raw_gates.matrix(rows_, query_width());
      for (int64_t head = 0, dim = attention().head_dim; head < attention().heads; ++head) {
        pick(both, 2 * head * dim, 1, columns(heads.queries, head * dim, dim));
        pick(both, (2 * head + 1) * dim, 1, columns(heads.gates, head * dim, dim));
      }
    }
    if (attention().keys_are_values) heads.values = heads.keys;
    return heads;
  }

  std::vector<float> value_norm() const { return std::vector<float>(static_cast<size_t>(attention().head_dim), 1.0f); }

  /// Turns heads, or gradients by turned heads back.
  void turn(MatrixView<float> heads, bool back) {
    const RopeConfig& rope = attention().rope;
    if (rope.partial_rotary_factor == 0) return;
    const RopeTable table(rope, attention().head_dim);
    const auto cosine = scratch_.cosine.matrix(rows_, table.pairs()), sine = scratch_.sine.matrix(rows_, table.pairs());
    table.fill(0, cosine, sine);
    if (back) scale_rows(sine, -1);
    (rope.neighbours ? kernels::rotate_neighbours : kernels::rotate_heads)(heads, attention().head_dim, cosine, sine);
  }

  kernels::AttentionRows<float> turned() {
    return {memory_.queries.matrix(rows_, query_width()), memory_.keys.matrix(rows_, key_width()),
            memory_.values.matrix(rows_, key_width())};
  }

  kernels::AttentionOptions options() const {
    return {.window = attention().window,
            .scale = attention().scale,
            .soft_cap = attention().soft_cap,
            .sinks = vector(VectorRole::sinks)};
  }

  void attend() {
    const Heads raw = raw_heads();
    const auto [queries, keys, values] = turned();
    copy_rows(raw.queries, queries);
    copy_rows(raw.keys, keys);
    copy_rows(raw.values, values);
    if (const auto weight = norm(NormRole::query); !weight.empty()) kernels::rms_norm_heads(queries, weight, eps_);
    if (const auto weight = norm(NormRole::key); !weight.empty()) kernels::rms_norm_heads(keys, weight, eps_);
    if (attention().value_norm) kernels::rms_norm_heads(values, value_norm(), eps_);
    turn(queries, false);
    turn(keys, false);
    warm_queries(attention(), 0, queries);
    const kernels::KeyValueCache cache{scratch_.cached_keys.matrix(rows_, key_width()).data,
                                       scratch_.cached_values.matrix(rows_, key_width()).data, attention().kv_heads,
                                       rows_, attention().head_dim};
    kernels::append(cache, 0, keys, values);
    kernels::attention(queries, cache, 0, options(), attended());
    if (!attention().output_gate) return;
    copy_rows(attended(), mixed());
    kernels::sigmoid_multiply(mixed(), raw.gates);
  }

  /// Before the gates of the output.
  MatrixView<float> attended() {
    return attention().output_gate ? memory_.gates.matrix(rows_, query_width()) : mixed();
  }

  void attend_back(MatrixView<float> gradient, const NormObserver& norms) {
    const Heads raw = raw_heads();
    Heads by = heads_of(scratch_.by_products);
    const auto by_both = by.queries;
    if (attention().output_gate) {
      by.queries = scratch_.by_queries.matrix(rows_, query_width());
      by.gates = scratch_.by_gates.matrix(rows_, query_width());
      kernels::sigmoid_multiply_gradient(attended(), raw.gates, gradient, by.gates);
    }
    if (attention().keys_are_values) by.values = scratch_.by_values.matrix(rows_, key_width());
    const auto heads = turned();
    kernels::attention_gradient({heads.queries, heads.keys, heads.values}, attention().head_dim, options(), attended(),
                                gradient, {by.queries, by.keys, by.values});
    warm_queries(attention(), 0, by.queries);
    turn(by.queries, true);
    turn(by.keys, true);
    norm_back(NormRole::query, raw.queries, by.queries, norms);
    norm_back(NormRole::key, raw.keys, by.keys, norms);
    if (attention().value_norm) kernels::rms_norm_gradient(raw.values, value_norm(), eps_, by.values);
    if (attention().keys_are_values) kernels::add_rows(by.keys, by.values);
    if (!attention().output_gate) return;
    for (int64_t head = 0, dim = attention().head_dim; head < attention().heads; ++head) {
      place(columns(by.queries, head * dim, dim), by_both, 2 * head * dim, 1);
      place(columns(by.gates, head * dim, dim), by_both, (2 * head + 1) * dim, 1);
    }
  }

  const LayerWeights& weights_;
  const Block& block_;
  const float eps_;
  const int64_t rows_;
  GradientMemory& memory_;
  GradientScratch& scratch_;
};

/// What there is no way back through, empty: nothing.
std::string_view obstacle(const Block& block) {
  switch (block.kind) {
    case BlockKind::layer_embedding:
      return "embeddings of its own";
    default:
      if (block.attention.clip != 0) return "queries, keys and values that are cut off";
      return block.attention.keys_of ? "the keys of another layer" : "";
  }
}

}  // namespace

void require_gradients(const ModelConfig& config, std::string_view what) {
  require_decoder(config, what);
  if (const auto found = obstacle_to_gradients(config); !found.empty()) {
    throw Error(ErrorCode::unsupported, concat("there is no ", what, " for ", config.architecture_name))
        .detail(concat(found, ", through which gradients find no way back"));
  }
}

std::string obstacle_to_gradients(const ModelConfig& config) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto found = obstacle_to_gradients(layer_plan(config, layer));
    if (!found.empty()) return concat("layer ", layer, " has ", found);
  }
  return {};
}

std::string_view obstacle_to_gradients(const LayerPlan& plan) {
  for (const Block& block : plan.blocks) {
    if (const auto found = obstacle(block); !found.empty()) return found;
  }
  return {};
}

int64_t tape_bytes(const ModelConfig& config, int64_t length) {
  int64_t most = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t width = 0;
    for (const Block& block : layer_plan(config, layer).blocks) {
      width += 6 * config.hidden_size;
      for (const auto& group : block.groups) {
        for (const auto& linear : group.linears) width += group.expert ? 0 : 5 * std::max(linear.n, linear.k);
      }
    }
    most = std::max(most, width);
  }
  return length * most * int64_t{sizeof(float)};
}

GradientTape::GradientTape() = default;
GradientTape::~GradientTape() = default;
GradientTape::GradientTape(GradientTape&&) noexcept = default;

struct LayerGradient::Impl {
  BlockGradient block(const LayerWeights& weights, size_t index, int64_t rows, GradientMemory& memory) {
    const auto eps = static_cast<float>(config.rms_norm_eps);
    return {weights, weights.plan.blocks[index], eps, rows, memory, scratch};
  }

  const ModelConfig& config;
  GradientTape tape = {};
  GradientScratch scratch = {};
  Floats hidden = {};
};

LayerGradient::LayerGradient(const ModelConfig& config) : impl_(std::make_unique<Impl>(config)) {}
LayerGradient::~LayerGradient() = default;
LayerGradient::LayerGradient(LayerGradient&&) noexcept = default;

void LayerGradient::check(const LayerWeights& weights, MatrixView<const float> x) const {
  ensure(x.cols == impl_->config.hidden_size, "LayerGradient: shapes differ");
  ensure(obstacle_to_gradients(weights.plan).empty(), "LayerGradient: a layer without a way back");
}

void LayerGradient::run_blocks(const LayerWeights& weights, MatrixView<float> x, GradientTape& tape, bool goes_on) {
  const size_t count = weights.plan.blocks.size();
  tape.blocks_.resize(std::max(tape.blocks_.size(), count));
  for (size_t b = 0; b < count; ++b) {
    impl_->block(weights, b, x.rows, tape.blocks_[b]).forward(x, goes_on || b + 1 < count);
  }
}

void LayerGradient::forward(const LayerWeights& weights, MatrixView<float> x, GradientTape& tape) {
  check(weights, x);
  run_blocks(weights, x, tape, true);
}

void LayerGradient::back(const LayerWeights& weights, MatrixView<float> gradient, GradientTape& tape,
                         const GradientObserver& observer, const NormObserver& norms) {
  check(weights, gradient);
  ensure(tape.blocks_.size() >= weights.plan.blocks.size(), "LayerGradient: no way forth on the tape");
  for (size_t b = weights.plan.blocks.size(); b-- > 0;) {
    impl_->block(weights, b, gradient.rows, tape.blocks_[b]).backward(gradient, observer, norms);
  }
}

void LayerGradient::run(const LayerWeights& weights, MatrixView<const float> x, MatrixView<float> gradient,
                        const GradientObserver& observer, const NormObserver& norms) {
  check(weights, x);
  ensure(gradient.rows == x.rows && gradient.cols == x.cols, "LayerGradient: shapes differ");
  const auto hidden = impl_->hidden.matrix(x.rows, x.cols);
  copy_rows(x, hidden);
  run_blocks(weights, hidden, impl_->tape, false);
  back(weights, gradient, impl_->tape, observer, norms);
}

}  // namespace w4q::model
