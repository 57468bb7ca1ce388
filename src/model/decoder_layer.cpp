#include "model/decoder_layer.h"

#include <algorithm>
#include <cmath>
#include <vector>

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

}  // namespace

void embed(const LinearWeight& embeddings, std::span<const int32_t> ids, MatrixView<float> out) {
  parallel_for(out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = ids[static_cast<size_t>(r)];
      kernels::decode_rows(embeddings, id, id + 1, {out.row(r), 1, out.cols});
    }
  });
}

/// A rotary embedding of some of the layers, at the positions that were set.
struct Angles {
  RopeConfig config;
  RopeTable table;
  Floats cosine, sine;
  MatrixView<float> cosines, sines;
};

struct LayerDecoder::Impl {
  Impl(const ModelConfig& config_, DType rope_frequencies)
      : config(config_), eps(static_cast<float>(config.rms_norm_eps)) {
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      for (const auto& block : layer_plan(config, layer).blocks) {
        if (block.kind != BlockKind::attention ||
            std::ranges::find(ropes, block.rope, &Angles::config) != ropes.end()) {
          continue;
        }
        ropes.push_back({block.rope, RopeTable(block.rope, config.head_dim, rope_frequencies), {}, {}, {}, {}});
      }
    }
  }

  void run_block(const LayerWeights& weights, const Block& block, const kernels::KeyValueCache& cache,
                 MatrixView<float> x, const Observer* observer);
  /// What the first group's products make: the input of the last group.
  MatrixView<float> attend(const LayerWeights& weights, const Block& block, const kernels::KeyValueCache& cache,
                           int64_t rows);
  MatrixView<float> gate(const Block& block, int64_t rows);
  /// The products of a group, one for each of its linears.
  void multiply(const LayerWeights& weights, const InputGroup& group, MatrixView<const float> input,
                std::vector<Floats>& products, const Observer* observer);

  const ModelConfig& config;
  const float eps;
  int64_t position = 0, set_rows = 0;
  bool int8_activations = false;
  Floats normed, attended;
  std::vector<Floats> first, last;  // products of a block's groups
  std::vector<Angles> ropes;        // as many as layers differ in
};

void LayerDecoder::Impl::multiply(const LayerWeights& weights, const InputGroup& group, MatrixView<const float> input,
                                  std::vector<Floats>& products, const Observer* observer) {
  if (observer && observer->linear_input) {
    std::vector<std::string_view> names;
    for (const auto& linear : group.linears) names.push_back(linear.name);
    observer->linear_input(names, input);
  }
  if (products.size() < group.linears.size()) products.resize(group.linears.size());
  for (size_t i = 0; i < group.linears.size(); ++i) {
    const LinearWeight& weight = weights.linears[group.linears[i].position];
    const auto product =
        int8_activations && kernels::takes_int8_activations(weight) ? kernels::linear_int8 : kernels::linear;
    product(weight, input, products[i].matrix(input.rows, weight.n));
  }
}

MatrixView<float> LayerDecoder::Impl::attend(const LayerWeights& weights, const Block& block,
                                             const kernels::KeyValueCache& cache, int64_t rows) {
  const int64_t key_width = config.kv_heads * config.head_dim;
  const auto q = first[0].matrix(rows, config.heads * config.head_dim);
  const auto k = first[1].matrix(rows, key_width), v = first[2].matrix(rows, key_width);
  if (const auto* norm = block.norm(NormRole::query)) kernels::rms_norm_heads(q, weights.norms[norm->position], eps);
  if (const auto* norm = block.norm(NormRole::key)) kernels::rms_norm_heads(k, weights.norms[norm->position], eps);
  const Angles& angles = *std::ranges::find(ropes, block.rope, &Angles::config);
  kernels::rotate_heads(q, config.head_dim, angles.cosines, angles.sines);
  kernels::rotate_heads(k, config.head_dim, angles.cosines, angles.sines);
  if (block.attention_scale != 0) {
    const auto factor = static_cast<float>(block.attention_scale * std::sqrt(static_cast<double>(config.head_dim)));
    std::for_each_n(q.data, q.rows * q.cols, [&](float& value) { value *= factor; });
  }
  kernels::append(cache, position, k, v);
  const auto mixed = attended.matrix(rows, q.cols);
  kernels::attention(q, cache, position, block.window, mixed);
  return mixed;
}

MatrixView<float> LayerDecoder::Impl::gate(const Block& block, int64_t rows) {
  const auto gated = first[0].matrix(rows, block.groups.back().width);
  kernels::silu_multiply(gated, first[1].matrix(rows, gated.cols));
  return gated;
}

/// x += output_norm(block(input_norm(x))).
void LayerDecoder::Impl::run_block(const LayerWeights& weights, const Block& block, const kernels::KeyValueCache& cache,
                                   MatrixView<float> x, const Observer* observer) {
  const auto input = normed.matrix(x.rows, x.cols);
  kernels::rms_norm(x, weights.norms[block.norm(NormRole::input)->position], eps, input);
  multiply(weights, block.groups.front(), input, first, observer);
  const bool attends = block.kind == BlockKind::attention;
  const auto mixed = attends ? attend(weights, block, cache, x.rows) : gate(block, x.rows);
  multiply(weights, block.groups.back(), mixed, last, observer);
  const auto output = last[0].matrix(x.rows, x.cols);
  if (const auto* norm = block.norm(NormRole::output)) {
    kernels::rms_norm(output, weights.norms[norm->position], eps, output);
  }
  kernels::add_rows(x, output);
}

LayerDecoder::LayerDecoder(const ModelConfig& config, DType rope_frequencies)
    : impl_(std::make_unique<Impl>(config, rope_frequencies)) {}
LayerDecoder::~LayerDecoder() = default;
LayerDecoder::LayerDecoder(LayerDecoder&&) noexcept = default;

void LayerDecoder::set_positions(int64_t first, int64_t rows) {
  impl_->position = first;
  impl_->set_rows = rows;
  for (auto& angles : impl_->ropes) {
    angles.cosines = angles.cosine.matrix(rows, angles.table.pairs());
    angles.sines = angles.sine.matrix(rows, angles.table.pairs());
    angles.table.fill(first, angles.cosines, angles.sines);
  }
}

void LayerDecoder::set_int8_activations(bool on) noexcept { impl_->int8_activations = on; }

void LayerDecoder::run(const LayerWeights& weights, const kernels::KeyValueCache& cache, MatrixView<float> x,
                       const Observer* observer) {
  const bool fits = x.cols == impl_->config.hidden_size && x.rows == impl_->set_rows;
  ensure(fits, "a decoder layer got hidden states of another shape than was set");
  for (const auto& block : weights.plan.blocks) {
    const int64_t most = block.kind == BlockKind::attention ? x.rows : mlp_rows;
    for (int64_t begin = 0; begin < x.rows; begin += most) {
      const MatrixView<float> rows(x.row(begin), std::min(most, x.rows - begin), x.cols, x.stride);
      impl_->run_block(weights, block, cache, rows, observer);
    }
  }
}

}  // namespace w4q::model
