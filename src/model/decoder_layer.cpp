#include "model/decoder_layer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/gates.h"
#include "kernels/linear/linear.h"
#include "model/columns.h"
#include "model/delta_heads.h"
#include "model/rope_table.h"
#include "model/router.h"
#include "model/scratch.h"

namespace w4q::model {
namespace {

using kernels::LinearWeight;

/// Values beyond ± limit become that; 0: none does.
void clip_rows(MatrixView<float> rows, double limit) {
  if (limit == 0) return;
  const auto most = static_cast<float>(limit);
  parallel_for(rows.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (float& value : std::span(rows.row(r), static_cast<size_t>(rows.cols)))
        value = std::clamp(value, -most, most);
    }
  });
}

/// Rows that pass through the MLP together, so that a long prompt does not hold its wide activations all at once.
constexpr int64_t mlp_rows = 1024;

}  // namespace

void embed(const ModelConfig& config, const LinearWeight& embeddings, std::span<const int32_t> ids,
           MatrixView<float> out) {
  parallel_for(out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = ids[static_cast<size_t>(r)];
      kernels::decode_rows(embeddings, id, id + 1, {out.row(r), 1, out.cols});
    }
  });
  scale_rows(out, config.embedding_scale);
}

namespace {

/// Of projected hidden states, for columns `first` … of the embeddings of all layers.
void finish_layer_embeddings(const ModelConfig& config, const LayerEmbeddings& weights, int64_t first,
                             std::span<const int32_t> ids, MatrixView<float> out) {
  scale_rows(out, 1 / std::sqrt(static_cast<double>(config.hidden_size)));
  kernels::rms_norm_heads(out, weights.norm, static_cast<float>(config.rms_norm_eps));
  const auto own = static_cast<float>(std::sqrt(static_cast<double>(config.layer_embedding_size)));
  const auto both = static_cast<float>(std::sqrt(0.5));
  parallel_for(out.rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(weights.table.k));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = ids[static_cast<size_t>(r)];
      kernels::decode_rows(weights.table, id, id + 1, {row.data(), 1, weights.table.k});
      for (int64_t c = 0; c < out.cols; ++c)
        out.row(r)[c] = (out.row(r)[c] + row[static_cast<size_t>(first + c)] * own) * both;
    }
  });
}

}  // namespace

void embed_layers(const ModelConfig& config, const LayerEmbeddings& weights, std::span<const int32_t> ids,
                  MatrixView<const float> hidden, MatrixView<float> out) {
  kernels::linear(weights.projection, hidden, out);
  finish_layer_embeddings(config, weights, 0, ids, out);
}

LayerProjection::LayerProjection(const ModelConfig& config, const LayerEmbeddings& weights, int64_t layer)
    : first(layer * config.layer_embedding_size),
      values(static_cast<size_t>(config.layer_embedding_size * weights.projection.k)) {
  const int64_t n = config.layer_embedding_size, k = weights.projection.k;
  kernels::decode_rows(weights.projection, first, first + n, {values.data(), n, k});
  const TensorView view{weights.projection.name, DType::f32, {n, k}, bytes_of(values)};
  weight = {weights.projection.name, n, k, kernels::LinearWeight::Dense{view, nullptr}, {}};
}

void embed_layer(const ModelConfig& config, const LayerEmbeddings& weights, const LayerProjection& projection,
                 std::span<const int32_t> ids, MatrixView<const float> hidden, MatrixView<float> out) {
  kernels::linear(projection.weight, hidden, out);
  finish_layer_embeddings(config, weights, projection.first, ids, out);
}

void begin_hidden(const Model& model, std::span<const int32_t> ids, LayerDecoder& runner, Floats& scratch,
                  MatrixView<float> x) {
  embed(model.config(), model.embeddings(), ids, x);
  const auto& own = model.layer_embeddings();
  if (!own) return;
  const auto rows = scratch.matrix(x.rows, own->table.k);
  embed_layers(model.config(), *own, ids, x, rows);
  runner.set_layer_embeddings(rows);
}

/// A rotary embedding of some of the layers, at the positions that were set.
struct Angles {
  RopeConfig config;
  int64_t head_dim;
  RopeTable table;
  Floats cosine, sine;
  MatrixView<float> cosines, sines;
};

/// What runs one block on some rows.
struct BlockRun {
  const LayerWeights& weights;
  const Block& block;
  std::span<const LayerMemory> memories;  ///< one, or one for each row
  const Observer* observer;
  int64_t first_row;  ///< of these rows among those that were set
  LayerPart::End end = LayerPart::End::behind;

  std::span<const float> norm(NormRole role) const {
    const auto* planned = block.norm(role);
    return planned == nullptr ? std::span<const float>{} : weights.norms[planned->position];
  }
  std::span<const float> vector(VectorRole role) const {
    const auto* planned = block.vector(role);
    return planned == nullptr ? std::span<const float>{} : weights.vectors[planned->position];
  }
};

struct LayerDecoder::Impl {
  Impl(const ModelConfig& config_, DType rope_frequencies)
      : config(config_), eps(static_cast<float>(config.rms_norm_eps)) {
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      for (const auto& block : layer_plan(config, layer).blocks) {
        const AttentionConfig& attention = block.attention;
        const bool turns = block.kind == BlockKind::attention && attention.rope.partial_rotary_factor != 0;
        if (!turns || angles_of(attention) != nullptr) continue;
        ropes.push_back({attention.rope,
                         attention.head_dim,
                         RopeTable(attention.rope, attention.head_dim, rope_frequencies),
                         {},
                         {},
                         {},
                         {}});
      }
    }
  }

  const Angles* angles_of(const AttentionConfig& attention) const {
    const auto found = std::ranges::find_if(ropes, [&](const Angles& angles) {
      return angles.config == attention.rope && angles.head_dim == attention.head_dim;
    });
    return found == ropes.end() ? nullptr : &*found;
  }

  /// x += output_norm(block(input_norm(x))).
  void run_block(const BlockRun& run, MatrixView<float> x);
  /// What goes into a block's last group.
  MatrixView<float> attend(const BlockRun& run, MatrixView<const float> input);
  MatrixView<float> recall(const BlockRun& run, MatrixView<const float> input);
  MatrixView<float> embed_layer(const BlockRun& run, MatrixView<const float> input);
  /// What experts and the shared MLP add.
  MatrixView<float> mix(const BlockRun& run, MatrixView<const float> x, MatrixView<const float> input);
  void run_experts(const BlockRun& run, const Routing& routing, MatrixView<const float> input, MatrixView<float> sum);
  void run_shared(const BlockRun& run, MatrixView<const float> input, MatrixView<const float> shares,
                  MatrixView<float> sum);
  static void show(const BlockRun& run, const InputGroup& group, MatrixView<const float> input);
  /// The products of a group, one for each of its linears.
  void multiply(const BlockRun& run, const InputGroup& group, MatrixView<const float> input,
                std::vector<Floats>& products);
  /// act(gate) · up of the products of `group`.
  MatrixView<float> gate(const BlockRun& run, const InputGroup& group, std::vector<Floats>& products, int64_t rows);
  /// Calls use(memory, first, count) for stretches of rows that belong to one sequence.
  void for_each_sequence(const BlockRun& run, int64_t rows,
                         const std::function<void(const LayerMemory& memory, int64_t first, int64_t count)>& use) const;
  void turn(const AttentionConfig& attention, MatrixView<float> heads);
  void warm(const AttentionConfig& attention, MatrixView<float> queries) const;

  const ModelConfig& config;
  const float eps;
  int64_t position = 0, set_rows = 0;
  bool apart = false;  ///< each row is of a sequence of its own
  bool int8_activations = false;
  MatrixView<const float> layer_embeddings = {};
  Floats normed, attended, picked, gates, summed, chosen_rows, learned, kept;
  std::vector<Floats> first, last, routed, inner, outer;  // products of a block's groups
  std::vector<Angles> ropes;                              // as many as layers differ in
};

void LayerDecoder::Impl::show(const BlockRun& run, const InputGroup& group, MatrixView<const float> input) {
  if (run.observer == nullptr || !run.observer->linear_input) return;
  std::vector<std::string_view> names;
  for (const auto& linear : group.linears) names.push_back(linear.name);
  run.observer->linear_input(names, input);
}

void LayerDecoder::Impl::multiply(const BlockRun& run, const InputGroup& group, MatrixView<const float> input,
                                  std::vector<Floats>& products) {
  show(run, group, input);
  if (products.size() < group.linears.size()) products.resize(group.linears.size());
  for (size_t i = 0; i < group.linears.size(); ++i) {
    const LinearWeight& weight = run.weights.linears[group.linears[i].position];
    const auto product =
        int8_activations && kernels::takes_int8_activations(weight) ? kernels::linear_int8 : kernels::linear;
    product(weight, input, products[i].matrix(input.rows, weight.n));
  }
}

void LayerDecoder::Impl::for_each_sequence(
    const BlockRun& run, int64_t rows,
    const std::function<void(const LayerMemory& memory, int64_t first, int64_t count)>& use) const {
  if (!apart) return use(run.memories.front(), 0, rows);
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) use(run.memories[static_cast<size_t>(r)], r, 1);
  });
}

void LayerDecoder::Impl::turn(const AttentionConfig& attention, MatrixView<float> heads) {
  const Angles* const angles = angles_of(attention);
  if (angles == nullptr) return;
  const auto rotate = attention.rope.neighbours ? kernels::rotate_neighbours : kernels::rotate_heads;
  rotate(heads, attention.head_dim, angles->cosines, angles->sines);
}

void LayerDecoder::Impl::warm(const AttentionConfig& attention, MatrixView<float> queries) const {
  if (!apart) return warm_queries(attention, position, queries);
  for (int64_t r = 0; r < queries.rows; ++r) warm_queries(attention, position, {queries.row(r), 1, queries.cols});
}

MatrixView<float> LayerDecoder::Impl::attend(const BlockRun& run, MatrixView<const float> input) {
  const AttentionConfig& attention = run.block.attention;
  const InputGroup& group = run.block.groups.front();
  multiply(run, group, input, first);
  const int64_t rows = input.rows, dim = attention.head_dim;
  const int64_t query_width = attention.heads * dim, key_width = attention.kv_heads * dim;
  MatrixView<float> q, k, v, gating;
  for (size_t i = 0; i < group.linears.size(); ++i) {
    const auto product = first[i].matrix(rows, group.linears[i].n);
    switch (group.linears[i].role) {
      case Role::query_key_value:
        q = columns(product, 0, query_width);
        k = columns(product, query_width, key_width);
        v = columns(product, query_width + key_width, key_width);
        break;
      case Role::key:
        k = product;
        break;
      case Role::value:
        v = product;
        break;
      default:
        q = product;
    }
  }
  if (attention.output_gate) {
    const auto both = q;
    q = picked.matrix(rows, query_width), gating = gates.matrix(rows, query_width);
    for (int64_t head = 0; head < attention.heads; ++head) {
      pick(both, 2 * head * dim, 1, columns(q, head * dim, dim));
      pick(both, (2 * head + 1) * dim, 1, columns(gating, head * dim, dim));
    }
  }
  if (attention.keys_are_values) {
    v = kept.matrix(rows, key_width);
    pick(k, 0, 1, v);
  }
  if (const auto norm = run.norm(NormRole::query); !norm.empty()) kernels::rms_norm_heads(q, norm, eps);
  clip_rows(q, attention.clip);
  turn(attention, q);
  warm(attention, q);
  if (!attention.keys_of) {
    if (const auto norm = run.norm(NormRole::key); !norm.empty()) kernels::rms_norm_heads(k, norm, eps);
    if (attention.value_norm) {
      const std::vector<float> ones(static_cast<size_t>(dim), 1.0f);
      kernels::rms_norm_heads(v, ones, eps);
    }
    clip_rows(k, attention.clip);
    clip_rows(v, attention.clip);
    turn(attention, k);
  }
  const auto mixed = attended.matrix(rows, query_width);
  const kernels::AttentionOptions how{.window = attention.window,
                                      .scale = attention.scale,
                                      .soft_cap = attention.soft_cap,
                                      .sinks = run.vector(VectorRole::sinks)};
  for_each_sequence(run, rows, [&](const LayerMemory& memory, int64_t from, int64_t count) {
    const auto part = [&](MatrixView<float> all) {
      return MatrixView<float>(all.row(from), count, all.cols, all.stride);
    };
    if (!attention.keys_of) kernels::append(memory.cache, position, part(k), part(v));
    kernels::attention(part(q), memory.cache, position, how, part(mixed));
  });
  if (attention.output_gate) kernels::sigmoid_multiply(mixed, gating);
  return mixed;
}

MatrixView<float> LayerDecoder::Impl::recall(const BlockRun& run, MatrixView<const float> input) {
  const kernels::DeltaShape& shape = run.block.delta;
  const InputGroup& group = run.block.groups.front();
  multiply(run, group, input, first);
  const int64_t rows = input.rows, heads = shape.value_heads;
  MatrixView<float> mixed, gating, beta, decay;
  if (group.linears.size() == 2) {
    const auto both = learned.matrix(rows, 2 * heads);
    mixed = picked.matrix(rows, shape.channels()), gating = gates.matrix(rows, shape.values());
    beta = columns(both, 0, heads), decay = columns(both, heads, heads);
    part_delta_heads(shape, first[0].matrix(rows, group.linears[0].n), first[1].matrix(rows, 2 * heads),
                     {mixed, gating, beta, decay});
  } else {
    mixed = first[0].matrix(rows, shape.channels()), gating = first[1].matrix(rows, shape.values());
    beta = first[2].matrix(rows, heads), decay = first[3].matrix(rows, heads);
  }
  activate_delta(run.vector(VectorRole::decay), run.vector(VectorRole::step_bias), beta, decay);
  const auto out = attended.matrix(rows, shape.values());
  for_each_sequence(run, rows, [&](const LayerMemory& memory, int64_t from, int64_t count) {
    const auto part = [&](MatrixView<float> all) {
      return MatrixView<float>(all.row(from), count, all.cols, all.stride);
    };
    const auto& [history, state] = memory.delta;
    if (position == 0) {
      std::fill_n(history, shape.history_size(), 0.0f);
      std::fill_n(state, shape.state_size(), 0.0f);
    }
    kernels::causal_convolution(shape, run.vector(VectorRole::convolution), history, part(mixed),
                                run.block.gating.activation);
    kernels::delta_rule(shape, part(mixed), part(beta), part(decay), state, part(out));
  });
  kernels::rms_norm_heads(out, run.norm(NormRole::delta), eps);
  kernels::silu(gating);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) out.row(r)[c] *= gating.row(r)[c];
  }
  return out;
}

MatrixView<float> LayerDecoder::Impl::gate(const BlockRun& run, const InputGroup& group, std::vector<Floats>& products,
                                           int64_t rows) {
  const Block& block = run.block;
  if (group.linears.size() == 2) {
    const auto gated = products[0].matrix(rows, group.linears[0].n);
    kernels::gate_multiply(block.gating, gated, products[1].matrix(rows, gated.cols));
    return gated;
  }
  const auto both = products[0].matrix(rows, group.linears[0].n);
  const int64_t width = both.cols / 2;
  const bool in_turn = block.storage == ExpertStorage::stacked_in_turn;
  const auto gated = picked.matrix(rows, width), up = gates.matrix(rows, width);
  pick(both, 0, in_turn ? 2 : 1, gated);
  pick(both, in_turn ? 1 : width, in_turn ? 2 : 1, up);
  kernels::gate_multiply(block.gating, gated, up);
  return gated;
}

MatrixView<float> LayerDecoder::Impl::embed_layer(const BlockRun& run, MatrixView<const float> input) {
  multiply(run, run.block.groups.front(), input, first);
  const auto gated = first[0].matrix(input.rows, config.layer_embedding_size);
  const int64_t layer = layer_numbers(run.block.groups.front().name()).layer;
  ensure(layer_embeddings.rows == set_rows, "a layer with embeddings of its own got none");
  const MatrixView<const float> own(layer_embeddings.row(run.first_row) + layer * config.layer_embedding_size,
                                    input.rows, gated.cols, layer_embeddings.stride);
  kernels::gate_multiply(run.block.gating, gated, own);
  return gated;
}

/// Each expert takes the rows that chose it, in their order.
void LayerDecoder::Impl::run_experts(const BlockRun& run, const Routing& routing, MatrixView<const float> input,
                                     MatrixView<float> sum) {
  const MixtureConfig& mixture = run.block.mixture;
  std::vector<std::vector<size_t>> takers(static_cast<size_t>(mixture.experts));
  for (size_t i = 0; i < routing.experts.size(); ++i) takers[static_cast<size_t>(routing.experts[i])].push_back(i);
  for (size_t expert = 0; expert < takers.size(); ++expert) {
    const auto& mine = takers[expert];
    if (mine.empty()) continue;
    const InputGroup& inputs = run.block.groups[1 + 2 * expert];
    const InputGroup& outputs = run.block.groups[2 + 2 * expert];
    const auto rows = chosen_rows.matrix(std::ssize(mine), input.cols);
    const auto row_of = [&](int64_t r) { return static_cast<int64_t>(mine[static_cast<size_t>(r)]) / mixture.chosen; };
    for (int64_t r = 0; r < rows.rows; ++r) std::copy_n(input.row(row_of(r)), input.cols, rows.row(r));
    multiply(run, inputs, rows, inner);
    multiply(run, outputs, gate(run, inputs, inner, rows.rows), outer);
    const auto product = outer[0].matrix(rows.rows, sum.cols);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const float share = routing.shares[mine[static_cast<size_t>(r)]];
      float* const to = sum.row(row_of(r));
      for (int64_t c = 0; c < sum.cols; ++c) to[c] += share * product.row(r)[c];
    }
  }
}

void LayerDecoder::Impl::run_shared(const BlockRun& run, MatrixView<const float> input, MatrixView<const float> shares,
                                    MatrixView<float> sum) {
  const auto& groups = run.block.groups;
  const InputGroup &inputs = groups[groups.size() - 2], &outputs = groups.back();
  multiply(run, inputs, input, inner);
  multiply(run, outputs, gate(run, inputs, inner, input.rows), outer);
  const auto product = outer[0].matrix(input.rows, sum.cols);
  if (const auto norm = run.norm(NormRole::dense_output); !norm.empty()) kernels::rms_norm(product, norm, eps, product);
  for (int64_t r = 0; r < product.rows && shares.rows > 0; ++r) {
    const float share = 1.0f / (1.0f + std::exp(-shares.row(r)[0]));
    for (int64_t c = 0; c < product.cols; ++c) product.row(r)[c] *= share;
  }
  kernels::add_rows(sum, product);
}

MatrixView<float> LayerDecoder::Impl::mix(const BlockRun& run, MatrixView<const float> x,
                                          MatrixView<const float> input) {
  const Block& block = run.block;
  const auto scratch = kept.matrix(x.rows, x.cols);
  MatrixView<const float> routed_input = input, expert_input = input;
  if (const auto weight = run.vector(VectorRole::router_scale); !weight.empty()) {
    // A norm without a weight, then a scale a channel over the root of the width.
    kernels::rms_norm(x, weight, eps, scratch);
    scale_rows(scratch, 1 / std::sqrt(static_cast<double>(x.cols)));
    routed_input = scratch;
  }
  multiply(run, block.groups.front(), routed_input, routed);
  const auto routing = route(block.mixture, routed[0].matrix(x.rows, block.mixture.experts),
                             run.vector(VectorRole::correction), run.vector(VectorRole::expert_scale));
  if (const auto norm = run.norm(NormRole::expert_input); !norm.empty()) {
    kernels::rms_norm(x, norm, eps, scratch);
    expert_input = scratch;
  }
  const auto sum = summed.matrix(x.rows, x.cols);
  std::fill_n(sum.data, sum.rows * sum.cols, 0.0f);
  run_experts(run, routing, expert_input, sum);
  if (const auto norm = run.norm(NormRole::expert_output); !norm.empty()) kernels::rms_norm(sum, norm, eps, sum);
  const bool has_shared = std::ssize(block.groups) > 1 + 2 * block.mixture.experts;
  const bool shares = block.groups.front().linears.size() > 1;
  if (has_shared) run_shared(run, input, shares ? routed[1].matrix(x.rows, 1) : MatrixView<float>{}, sum);
  return sum;
}

void LayerDecoder::Impl::run_block(const BlockRun& run, MatrixView<float> x) {
  const Block& block = run.block;
  MatrixView<const float> input = x;
  if (const auto norm = run.norm(NormRole::input); !norm.empty()) {
    const auto to = normed.matrix(x.rows, x.cols);
    kernels::rms_norm(x, norm, eps, to);
    input = to;
  }
  MatrixView<float> output;
  if (block.kind == BlockKind::mixture) {
    output = mix(run, x, input);
  } else {
    if (run.end == LayerPart::End::at_first_group) return show(run, block.groups.front(), input);
    MatrixView<float> mixed;
    switch (block.kind) {
      case BlockKind::attention:
        mixed = attend(run, input);
        break;
      case BlockKind::delta_net:
        mixed = recall(run, input);
        break;
      case BlockKind::layer_embedding:
        mixed = embed_layer(run, input);
        break;
      default:
        multiply(run, block.groups.front(), input, first);
        mixed = gate(run, block.groups.front(), first, x.rows);
    }
    if (run.end == LayerPart::End::at_last_group) return show(run, block.groups.back(), mixed);
    multiply(run, block.groups.back(), mixed, last);
    output = last[0].matrix(x.rows, x.cols);
  }
  if (const auto norm = run.norm(NormRole::output); !norm.empty()) kernels::rms_norm(output, norm, eps, output);
  scale_rows(output, block.output_scale);
  kernels::add_rows(x, output);
  if (const auto factor = run.vector(VectorRole::layer_scale); !factor.empty()) scale_rows(x, double{factor.front()});
}

LayerDecoder::LayerDecoder(const ModelConfig& config, DType rope_frequencies)
    : impl_(std::make_unique<Impl>(config, rope_frequencies)) {}
LayerDecoder::~LayerDecoder() = default;
LayerDecoder::LayerDecoder(LayerDecoder&&) noexcept = default;

void LayerDecoder::set_positions(int64_t first, int64_t rows) {
  impl_->position = first;
  impl_->set_rows = rows;
  impl_->apart = false;
  for (auto& angles : impl_->ropes) {
    angles.cosines = angles.cosine.matrix(rows, angles.table.pairs());
    angles.sines = angles.sine.matrix(rows, angles.table.pairs());
    angles.table.fill(first, angles.cosines, angles.sines);
  }
}

void LayerDecoder::set_step(int64_t position, int64_t rows) {
  set_positions(position, 1);
  impl_->set_rows = rows;
  impl_->apart = true;
  for (auto& angles : impl_->ropes) {
    const int64_t pairs = angles.table.pairs();
    const std::vector<float> cosine(angles.cosines.row(0), angles.cosines.row(0) + pairs);
    const std::vector<float> sine(angles.sines.row(0), angles.sines.row(0) + pairs);
    angles.cosines = angles.cosine.matrix(rows, pairs);
    angles.sines = angles.sine.matrix(rows, pairs);
    for (int64_t r = 0; r < rows; ++r) {
      std::ranges::copy(cosine, angles.cosines.row(r));
      std::ranges::copy(sine, angles.sines.row(r));
    }
  }
}

void LayerDecoder::set_int8_activations(bool on) noexcept { impl_->int8_activations = on; }

void LayerDecoder::set_layer_embeddings(MatrixView<const float> embeddings) noexcept {
  impl_->layer_embeddings = embeddings;
}

void LayerDecoder::run(const LayerWeights& weights, const LayerMemory& memory, MatrixView<float> x,
                       const Observer* observer) {
  run_part({0, weights.plan.blocks.size() - 1}, weights, memory, x, observer);
}

void LayerDecoder::run_part(const LayerPart& part, const LayerWeights& weights, const LayerMemory& memory,
                            MatrixView<float> x, const Observer* observer) {
  const bool fits = x.cols == impl_->config.hidden_size && x.rows == impl_->set_rows && !impl_->apart;
  ensure(fits, "a decoder layer got hidden states of another shape than was set");
  for (size_t i = part.first; i <= part.last; ++i) {
    const Block& block = weights.plan.blocks[i];
    const auto end = i == part.last ? part.end : LayerPart::End::behind;
    const bool at_once = block.kind == BlockKind::attention || block.kind == BlockKind::delta_net;
    const int64_t most = at_once ? x.rows : mlp_rows;
    for (int64_t begin = 0; begin < x.rows; begin += most) {
      const MatrixView<float> rows(x.row(begin), std::min(most, x.rows - begin), x.cols, x.stride);
      impl_->run_block({weights, block, {&memory, 1}, observer, begin, end}, rows);
    }
  }
}

void LayerDecoder::run(const LayerWeights& weights, std::span<const LayerMemory> memories, MatrixView<float> x) {
  const bool fits = x.cols == impl_->config.hidden_size && x.rows == impl_->set_rows && x.rows <= mlp_rows;
  ensure(fits && impl_->apart && std::ssize(memories) == x.rows,
         "a decoder layer got hidden states of another shape than was set");
  for (const auto& block : weights.plan.blocks) impl_->run_block({weights, block, memories, nullptr, 0}, x);
}

}  // namespace w4q::model
