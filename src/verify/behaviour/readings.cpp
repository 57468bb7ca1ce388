#include "verify/behaviour/readings.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <utility>

#include "core/text.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/gates.h"
#include "kernels/linear/linear.h"
#include "model/columns.h"
#include "model/rope_table.h"
#include "verify/behaviour/orders.h"

namespace w4q::verify::behaviour {
namespace {

using kernels::LinearWeight;
using model::AttentionConfig;
using model::Block;
using model::BlockKind;
using model::LayerWeights;
using model::NormRole;
using model::PlannedLinear;
using model::Role;
using model::VectorRole;

using Take = std::function<void(BlockReading reading)>;

/// Factors that are powers of two: what scales lose or get twice.
constexpr std::array<float, 5> factors = {0.5F, 0.125F, 1.0F / 64, 2.0F, 8.0F};

std::string times_text(float factor) {
  return factor < 1 ? concat(static_cast<int>(1 / factor), " times too large")
                    : concat(static_cast<int>(factor), " times too small");
}

Activations normed_input(const Reader& reader, const LayerWeights& weights, const Block& block,
                         const Activations& before) {
  const auto* norm = block.norm(NormRole::input);
  if (norm == nullptr) return before;
  Activations normed(before.rows, before.cols);
  kernels::rms_norm(before.view(), weights.norms[norm->position], static_cast<float>(reader.config.rms_norm_eps),
                    normed.view());
  return normed;
}

Activations part_of(Activations& x, int64_t begin, int64_t step, int64_t count) {
  Activations part(x.rows, count);
  model::pick(x.view(), begin, step, part.view());
  return part;
}

/// What the linears of a block's first group make of its input, by role; stored as one, taken apart.
struct Products {
  Activations query, key, value, output_gate, gate, up;
};

void take_heads_apart(const AttentionConfig& attention, Activations both, Products& to) {
  const int64_t dim = attention.head_dim, width = attention.heads * dim;
  to.query = Activations(both.rows, width), to.output_gate = Activations(both.rows, width);
  for (int64_t head = 0; head < attention.heads; ++head) {
    model::pick(both.view(), 2 * head * dim, 1, model::columns(to.query.view(), head * dim, dim));
    model::pick(both.view(), (2 * head + 1) * dim, 1, model::columns(to.output_gate.view(), head * dim, dim));
  }
}

void put(const Block& block, Role role, Activations product, Products& to) {
  const AttentionConfig& attention = block.attention;
  const int64_t dim = attention.head_dim, width = attention.heads * dim, keys = attention.kv_heads * dim;
  switch (role) {
    case Role::query_key_value:
      to.query = part_of(product, 0, 1, width), to.key = part_of(product, width, 1, keys);
      to.value = part_of(product, width + keys, 1, keys);
      break;
    case Role::gate_up: {
      const int64_t half = product.cols / 2;
      const bool in_turn = block.storage == model::ExpertStorage::stacked_in_turn;
      to.gate = part_of(product, 0, in_turn ? 2 : 1, half);
      to.up = part_of(product, in_turn ? 1 : half, in_turn ? 2 : 1, half);
      break;
    }
    case Role::query:
      attention.output_gate ? take_heads_apart(attention, std::move(product), to) : void(to.query = std::move(product));
      break;
    case Role::key:
      to.key = std::move(product);
      break;
    case Role::value:
      to.value = std::move(product);
      break;
    case Role::gate:
      to.gate = std::move(product);
      break;
    default:
      to.up = std::move(product);
  }
}

Products products_of(const Reader& reader, const LayerWeights& weights, const Block& block, const Activations& before) {
  const Activations input = normed_input(reader, weights, block, before);
  Products products;
  for (const PlannedLinear& linear : block.groups.front().linears) {
    Activations product(input.rows, linear.n);
    kernels::linear(weights.linears[linear.position], input.view(), product.view());
    put(block, linear.role, std::move(product), products);
  }
  return products;
}

/// What an attention block's output reads, of other products.
class Attention {
 public:
  Attention(const Reader& reader, const Reader::Place& place) : place_(place), block_(place.block()) {
    eps_ = static_cast<float>(reader.config.rms_norm_eps);
  }

  Activations mixed(Products products) const {
    const AttentionConfig& attention = block_.attention;
    const auto norm = [&](NormRole role, Activations& heads) {
      const auto* planned = block_.norm(role);
      if (planned != nullptr) {
        kernels::rms_norm_heads(heads.view(), place_.weights.norms[planned->position], eps_);
      }
    };
    if (attention.value_norm) {
      const std::vector<float> ones(static_cast<size_t>(attention.head_dim), 1.0f);
      kernels::rms_norm_heads(products.value.view(), ones, eps_);
    }
    norm(NormRole::query, products.query);
    norm(NormRole::key, products.key);
    turn(products.query);
    turn(products.key);
    model::warm_queries(attention, 0, products.query.view());
    Activations keys = products.key, values = products.value;  // of the same sizes
    const kernels::KeyValueCache cache{keys.values.data(), values.values.data(), attention.kv_heads, keys.rows,
                                       attention.head_dim};
    kernels::append(cache, 0, products.key.view(), products.value.view());
    const auto* sinks = block_.vector(VectorRole::sinks);
    const kernels::AttentionOptions how{
        .window = attention.window,
        .scale = attention.scale,
        .soft_cap = attention.soft_cap,
        .sinks = sinks == nullptr ? std::span<const float>{} : place_.weights.vectors[sinks->position]};
    Activations mixed(products.query.rows, products.query.cols);
    kernels::attention(products.query.view(), cache, 0, how, mixed.view());
    if (attention.output_gate) kernels::sigmoid_multiply(mixed.view(), products.output_gate.view());
    return mixed;
  }

 private:
  void turn(Activations& heads) const {
    const model::RopeConfig& rope = block_.attention.rope;
    if (rope.partial_rotary_factor == 0) return;
    const model::RopeTable table(rope, block_.attention.head_dim);
    Activations cosine(heads.rows, table.pairs()), sine(heads.rows, table.pairs());
    table.fill(0, cosine.view(), sine.view());
    (rope.neighbours ? kernels::rotate_neighbours : kernels::rotate_heads)(heads.view(), block_.attention.head_dim,
                                                                           cosine.view(), sine.view());
  }

  const Reader::Place& place_;
  const Block& block_;
  float eps_ = 0;
};

/// The readings of one block.
class BlockReadings {
 public:
  BlockReadings(Passage& passage, size_t place, const Take& take)
      : passage_(passage),
        at_(place),
        place_(passage.reader().places[place]),
        block_(place_.block()),
        around_(passage.around(place)),
        take_(take) {}

  void run() {
    read_output();
    switch (block_.kind) {
      case BlockKind::attention:
        if (!block_.attention.keys_are_values) read_attention();
        break;
      case BlockKind::gated_mlp:
        read_mlp();
        break;
      case BlockKind::delta_net:
        read_delta();
        break;
      case BlockKind::mixture:
        read_mixture();
        break;
      default:
        break;
    }
    read_weights();
    read_norms();
    read_other_layers();
  }

 private:
  const PlannedLinear& last() const { return block_.groups.back().linears.front(); }
  std::string layer() const { return concat("layer ", place_.layer); }
  const PlannedLinear* find(Role role) const {
    for (const auto& group : block_.groups) {
      for (const auto& linear : group.linears) {
        if (linear.role == role) return &linear;
      }
    }
    return nullptr;
  }
  std::string name(Role role) const {
    const auto* linear = find(role);
    return linear == nullptr ? concat("layer ", place_.layer) : linear->name;
  }
  std::string name_of_first(Role role) const {
    return find(role) != nullptr ? name(role) : block_.groups.front().name();
  }

  /// `factor`: of a size, 0: another order.
  void inner(std::string what, Activations values, float factor = 0) const {
    take_({std::move(what), kind_of(factor), std::move(values), {}});
  }
  void added(std::string what, Activations values, float factor = 0) const {
    take_({std::move(what), kind_of(factor), {}, std::move(values)});
  }
  void weights(std::string what, const LayerWeights& others, float factor = 0) const {
    added(std::move(what), passage_.added_by(others, at_), factor);
  }
  static ReadingKind kind_of(float factor) { return factor == 0 ? ReadingKind::order : ReadingKind::size; }

  /// Rows of what adds to the stream, and columns that it reads.
  void read_output() const {
    const bool mixture = block_.kind == BlockKind::mixture;
    const std::string of = mixture ? concat(layer(), "'s experts") : last().name;
    added(concat(of, " with all signs turned"), times(around_.added, -1));
    for (const float factor : factors) {
      added(concat(of, " ", times_text(factor)), times(around_.added, factor), factor);
    }
    for (const Order& order : orders_of(around_.added.cols, 0)) {
      added(concat(of, ": ", order.what), reordered(around_.added, order.from));
    }
    if (around_.inner.empty()) return;
    const int64_t head = block_.kind == BlockKind::attention   ? block_.attention.head_dim
                         : block_.kind == BlockKind::delta_net ? block_.delta.value_dim
                                                               : 0;
    for (const Order& order : orders_of(around_.inner.cols, head)) {
      inner(concat(of, ", its columns: ", order.what), reordered(around_.inner, order.from));
    }
  }

  void read_attention() const {
    const Products products = products_of(passage_.reader(), place_.weights, block_, around_.before);
    const Attention attention(passage_.reader(), place_);
    const auto with = [&](std::string what, Activations Products::*part, Activations values, float factor = 0) {
      Products other = products;
      other.*part = std::move(values);
      inner(std::move(what), attention.mixed(std::move(other)), factor);
    };
    const int64_t dim = block_.attention.head_dim;
    const std::array<std::pair<Activations Products::*, std::string>, 3> parts = {
        {{&Products::query, name_of_first(Role::query)},
         {&Products::key, name_of_first(Role::key)},
         {&Products::value, name_of_first(Role::value)}}};
    for (const auto& [part, of] : parts) {
      for (const Order& order : orders_of((products.*part).cols, dim)) {
        with(concat(of, ": ", order.what), part, reordered(products.*part, order.from));
      }
    }
    const bool normed = block_.norm(NormRole::query) != nullptr;
    with(concat(parts[0].second, " with all signs turned"), &Products::query, times(products.query, -1));
    for (const float factor : factors) {
      if (normed) break;
      with(concat(parts[0].second, " or ", parts[1].second, " ", times_text(factor)), &Products::query,
           times(products.query, factor), factor);
    }
    read_pairs(products, attention);
    if (products.key.cols == products.value.cols) {
      Products other = products;
      std::swap(other.key, other.value);
      inner(concat(parts[1].second, " and ", parts[2].second, " exchanged"), attention.mixed(std::move(other)));
    }
    if (products.key.cols == products.query.cols) {
      Products other = products;
      std::swap(other.key, other.query);
      inner(concat(parts[0].second, " and ", parts[1].second, " exchanged"), attention.mixed(std::move(other)));
    }
    if (!block_.attention.output_gate) return;
    Products other = products;
    std::swap(other.query, other.output_gate);
    inner(concat(parts[0].second, ": queries and gates exchanged"), attention.mixed(std::move(other)));
    read_gate_halves(products, attention);
  }

  /// Gates behind all queries, and read head by head.
  void read_gate_halves(const Products& products, const Attention& attention) const {
    const int64_t dim = block_.attention.head_dim, heads = block_.attention.heads;
    Products other = products;
    for (int64_t head = 0; head < heads; ++head) {
      const auto from = [&](int64_t at) {
        Activations values(products.query.rows, dim);
        const Activations& half = at % 2 == 0 ? products.query : products.output_gate;
        model::pick(half.view(), at / 2 * dim, 1, values.view());
        return values;
      };
      model::place(from(head).view(), other.query.view(), head * dim, 1);
      model::place(from(heads + head).view(), other.output_gate.view(), head * dim, 1);
    }
    inner(concat(name(Role::query), ": all queries before all gates"), attention.mixed(std::move(other)));
  }

  void read_pairs(const Products& products, const Attention& attention) const {
    const model::RopeConfig& rope = block_.attention.rope;
    if (rope.partial_rotary_factor == 0) return;
    const int64_t dim = block_.attention.head_dim, turning = 2 * model::RopeTable(rope, dim).pairs();
    const auto of_queries = pair_orders(products.query.cols, dim, turning);
    const auto of_keys = pair_orders(products.key.cols, dim, turning);
    for (size_t i = 0; i < of_queries.size(); ++i) {
      for (int which = 1; which < 4; ++which) {
        Products other = products;
        if ((which & 1) != 0) other.query = reordered(products.query, of_queries[i].from);
        if ((which & 2) != 0) other.key = reordered(products.key, of_keys[i].from);
        inner(concat((which & 1) != 0 ? name_of_first(Role::query) : "", which == 3 ? " and " : "",
                     (which & 2) != 0 ? name_of_first(Role::key) : "", ": ", of_queries[i].what),
              attention.mixed(std::move(other)));
      }
    }
  }

  void read_mlp() const {
    const Products products = products_of(passage_.reader(), place_.weights, block_, around_.before);
    const auto with = [&](std::string what, Activations gate, const Activations& up, float factor = 0) {
      kernels::gate_multiply(block_.gating, gate.view(), up.view());
      inner(std::move(what), std::move(gate), factor);
    };
    const std::string gate = name_of_first(Role::gate), up = name_of_first(Role::up);
    with(concat(gate, " and ", up, " exchanged"), products.up, products.gate);
    with(concat(gate, " with all signs turned"), times(products.gate, -1), products.up);
    for (const float factor : factors) {
      with(concat(gate, " ", times_text(factor)), times(products.gate, factor), products.up, factor);
    }
    for (const Order& order : orders_of(products.gate.cols, 0)) {
      with(concat(gate, ": ", order.what), reordered(products.gate, order.from), products.up);
      with(concat(up, ": ", order.what), products.gate, reordered(products.up, order.from));
    }
  }

  LayerWeights copy() const { return place_.weights; }

  void exchange_vectors(VectorRole one, VectorRole other) const {
    const auto *a = block_.vector(one), *b = block_.vector(other);
    if (a == nullptr || b == nullptr ||
        place_.weights.vectors[a->position].size() != place_.weights.vectors[b->position].size())
      return;
    LayerWeights changed = copy();
    std::swap(changed.vectors[a->position], changed.vectors[b->position]);
    weights(concat(a->name, " and ", b->name, " exchanged"), changed);
  }

  void exchange_linears(const PlannedLinear& one, const PlannedLinear& other) const {
    if (one.n != other.n || one.k != other.k) return;
    LayerWeights changed = copy();
    std::swap(changed.linears[one.position].matrix, changed.linears[other.position].matrix);
    weights(concat(one.name, " and ", other.name, " exchanged"), changed);
  }

  /// A copy of a linear whose rows stand otherwise, or which is scaled.
  LayerWeights with_rows(const PlannedLinear& linear, const std::vector<int64_t>& from, float factor = 1) const {
    auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(linear.n * linear.k));
    for (int64_t r = 0; r < linear.n; ++r) {
      const int64_t source = from.empty() ? r : from[static_cast<size_t>(r)];
      const MatrixView<float> row(values->data() + r * linear.k, 1, linear.k);
      kernels::decode_rows(place_.weights.linears[linear.position], source, source + 1, row);
      model::scale_rows(row, factor);
    }
    return with_values(linear, std::move(values));
  }

  LayerWeights with_values(const PlannedLinear& linear, std::shared_ptr<std::vector<float>> values) const {
    LayerWeights changed = copy();
    LinearWeight& weight = changed.linears[linear.position];
    const TensorView view{weight.name, DType::f32, {linear.n, linear.k}, bytes_of(*values)};
    weight.matrix = LinearWeight::Dense{view, std::move(values)};
    return changed;
  }

  void read_delta() const {
    exchange_vectors(VectorRole::decay, VectorRole::step_bias);
    const auto& linears = block_.groups.front().linears;
    const auto *beta = find(Role::delta_beta), *decay = find(Role::delta_decay);
    if (beta != nullptr && decay != nullptr) exchange_linears(*beta, *decay);
    for (const PlannedLinear& linear : linears) {
      const bool by_head = linear.role == Role::delta_mixed || linear.role == Role::delta_gate;
      const int64_t head = by_head ? block_.delta.value_dim : 0;
      for (const Order& order : orders_of(linear.n, head)) {
        weights(concat(linear.name, ": ", order.what), with_rows(linear, order.from));
      }
      weights(concat(linear.name, " with all signs turned"), with_rows(linear, {}, -1));
    }
    read_convolution();
    for (const VectorRole role : {VectorRole::decay, VectorRole::step_bias}) read_vector(role);
  }

  void read_vector(VectorRole role) const {
    const auto* vector = block_.vector(role);
    if (vector == nullptr) return;
    const auto change = [&](const std::string& what, const auto& use) {
      LayerWeights changed = copy();
      use(changed.vectors[vector->position]);
      weights(concat(vector->name, " ", what), changed);
    };
    change("with all signs turned", [](auto& values) { std::ranges::for_each(values, [](float& v) { v = -v; }); });
    change("reversed", [](auto& values) { std::ranges::reverse(values); });
    change("one place on", [](auto& values) { std::ranges::rotate(values, values.begin() + 1); });
    change("one place back", [](auto& values) { std::ranges::rotate(values, values.end() - 1); });
  }

  void read_convolution() const {
    const auto* taps = block_.vector(VectorRole::convolution);
    if (taps == nullptr) return;
    const auto change = [&](const char* what, const auto& use) {
      LayerWeights changed = copy();
      auto& values = changed.vectors[taps->position];
      const auto count = static_cast<size_t>(taps->shape.back());
      for (size_t c = 0; c + count <= values.size(); c += count) use(std::span(values).subspan(c, count));
      weights(concat(taps->name, ": taps ", what), changed);
    };
    change("reversed", [](std::span<float> each) { std::ranges::reverse(each); });
    change("one place on", [](std::span<float> each) { std::ranges::rotate(each, each.begin() + 1); });
    change("one place back", [](std::span<float> each) { std::ranges::rotate(each, each.end() - 1); });
  }

  void read_mixture() const {
    const PlannedLinear& router = block_.groups.front().linears.front();
    for (const Order& order : orders_of(router.n, 0)) {
      weights(concat(router.name, ": ", order.what), with_rows(router, order.from));
    }
    weights(concat(router.name, " with all signs turned"), with_rows(router, {}, -1));
    for (const float factor : factors) {
      weights(concat(router.name, " ", times_text(factor)), with_rows(router, {}, factor), factor);
    }
    if (block_.vector(VectorRole::correction) != nullptr) read_vector(VectorRole::correction);
    read_all_gates();
    read_all_downs();
    for (const Reader::Place& other : passage_.reader().places) {
      const Block& theirs = other.block();
      if (&other == &place_ || theirs.kind != BlockKind::mixture) continue;
      const PlannedLinear& of = theirs.groups.front().linears.front();
      if (of.n != router.n || of.k != router.k) continue;
      LayerWeights changed = copy();
      changed.linears[router.position].matrix = other.weights.linears[of.position].matrix;
      weights(concat(router.name, " in the place of ", of.name), changed);
      const auto *mine = block_.vector(VectorRole::correction), *bias = theirs.vector(VectorRole::correction);
      if (mine == nullptr || bias == nullptr) continue;
      LayerWeights biased = copy();
      biased.vectors[mine->position] = other.weights.vectors[bias->position];
      weights(concat(mine->name, " in the place of ", bias->name), biased);
    }
  }

  /// Groups 1, 3, … are experts' inputs, 2, 4, … their outputs.
  void read_all_gates() const {
    LayerWeights changed = copy();
    for (int64_t e = 0; e < block_.mixture.experts; ++e) {
      const auto& linears = block_.groups[static_cast<size_t>(1 + 2 * e)].linears;
      if (linears.size() != 2) return;
      std::swap(changed.linears[linears[0].position].matrix, changed.linears[linears[1].position].matrix);
    }
    weights(concat(layer(), ": gates and ups of all experts exchanged"), changed);
  }

  void read_all_downs() const {
    const int64_t count = block_.mixture.experts;
    for (const int64_t by : {int64_t{1}, count - 1}) {
      LayerWeights changed = copy();
      for (int64_t e = 0; e < count; ++e) {
        const auto position = [&](int64_t of) {
          return block_.groups[static_cast<size_t>(2 + 2 * of)].linears.front().position;
        };
        changed.linears[position(e)].matrix = place_.weights.linears[position((e + by) % count)].matrix;
      }
      weights(concat(layer(), ": downs of experts one place ", by == 1 ? "on" : "back"), changed);
    }
  }

  /// Linears of the block exchanged, and square ones transposed.
  void read_weights() const {
    if (block_.kind == BlockKind::mixture) return;
    std::vector<const PlannedLinear*> linears;
    for (const auto& group : block_.groups) {
      for (const auto& linear : group.linears) linears.push_back(&linear);
    }
    for (const PlannedLinear* one : linears) {
      if (one->n == one->k) transpose(*one);
    }
    const auto *query = find(Role::query), *output = find(Role::output);
    if (query != nullptr && output != nullptr) exchange_linears(*query, *output);
    if (const auto* gate = find(Role::delta_gate)) exchange_linears(*gate, last());
  }

  void transpose(const PlannedLinear& linear) const {
    const int64_t n = linear.n;
    std::vector<float> rows(static_cast<size_t>(n * n));
    kernels::decode_rows(place_.weights.linears[linear.position], 0, n, {rows.data(), n, n});
    auto values = std::make_shared<std::vector<float>>(rows.size());
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < n; ++c) (*values)[static_cast<size_t>(c * n + r)] = rows[static_cast<size_t>(r * n + c)];
    }
    weights(concat(linear.name, " transposed"), with_values(linear, std::move(values)));
  }

  void read_norms() const {
    const auto* mine = block_.norm(NormRole::input);
    if (mine == nullptr) return;
    const auto with = [&](const std::string& what, std::vector<float> values) {
      LayerWeights changed = copy();
      changed.norms[mine->position] = std::move(values);
      weights(what, changed, 1);  // as much a matter of size: another norm makes a block quieter
    };
    const auto& own = place_.weights.norms[mine->position];
    const auto moved = [&](float by) {
      std::vector<float> values = own;
      for (float& value : values) value += by;
      return values;
    };
    with(concat(mine->name, " less one"), moved(1));
    with(concat(mine->name, " with one added"), moved(-1));
    const auto orders = orders_of(std::ssize(own), 0);
    for (const Order& order : std::span(orders).first(2)) {
      std::vector<float> values(own.size());
      for (size_t c = 0; c < own.size(); ++c) values[c] = own[static_cast<size_t>(order.from[c])];
      with(concat(mine->name, ": ", order.what), std::move(values));
    }
    for (const Reader::Place& other : passage_.reader().places) {
      const auto* theirs = other.block().norm(NormRole::input);
      if (&other == &place_ || theirs == nullptr || theirs->size != mine->size) continue;
      const bool same_kind = other.block().kind == block_.kind, same_layer = other.layer == place_.layer;
      if (!same_layer && !(same_kind && std::abs(other.layer - place_.layer) <= 2)) continue;
      with(concat(theirs->name, " in the place of ", mine->name), other.weights.norms[theirs->position]);
    }
  }

  /// Of long models only the next few layers are tried.
  bool is_near(const Reader::Place& other) const {
    return std::abs(other.layer - place_.layer) <= (passage_.reader().config.layers <= 12 ? 12 : 2);
  }

  void read_other_layers() const {
    for (const Reader::Place& other : passage_.reader().places) {
      if (&other == &place_ || other.block().kind != block_.kind || !is_near(other)) continue;
      if (other.block().groups.size() != block_.groups.size()) continue;
      weights(concat(layer(), " and ", other.layer, " exchanged, or ", other.layer, " twice (",
                     block_.groups.front().name(), ")"),
              other.weights);
    }
  }

  Passage& passage_;
  const size_t at_;
  const Reader::Place& place_;
  const Block& block_;
  const Passage::Around& around_;
  const Take& take_;
};

}  // namespace

void for_each_reading(Passage& passage, size_t place, const std::function<void(BlockReading reading)>& take) {
  BlockReadings(passage, place, take).run();
}

}  // namespace w4q::verify::behaviour
