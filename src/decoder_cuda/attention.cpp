#include "decoder_cuda/attention.h"

#include <cmath>

#include "kernels/attention/heads_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using model::AttentionConfig;

/// 1 where attention kernels scale scores as the model does.
double scale_of_queries(const AttentionConfig& attention) {
  return attention.scale == 0 ? 1 : attention.scale * std::sqrt(static_cast<double>(attention.head_dim));
}

bool has_whole_norms(const model::Block& block) {
  const auto* norm = block.norm(model::NormRole::query);
  return norm != nullptr && norm->size != block.attention.head_dim;
}

int64_t width_of(const AttentionConfig& attention) {
  return (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
}

/// Heads side by side in activations.arranged, normed and turned, and stored where there is a layer to store them.
kernels::QkvRows arrange(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows,
                         const kernels::HeadRotation& rotation, const kernels::PagedLayer* store) {
  const AttentionConfig& attention = block.plan.attention;
  const int64_t queries = attention.heads * attention.head_dim, keys = attention.kv_heads * attention.head_dim;
  const int64_t stride = attention.output_gate ? width_of(attention) : block.groups.front().n;
  kernels::ArrangeHeadsArgs args;
  args.products = rows.products + rows.row * stride;
  args.rows = rows.count;
  args.stride = stride;
  args.heads = static_cast<int>(attention.heads);
  args.kv_heads = static_cast<int>(attention.kv_heads);
  args.head_dim = static_cast<int>(attention.head_dim);
  if (!attention.keys_of) {
    args.keys_at = queries;
    args.values_at = attention.keys_are_values ? queries : queries + keys;
  }
  args.rotation = with_norms(rotation, block, runner.config);
  args.neighbours = attention.rope.neighbours;
  args.whole_norms = has_whole_norms(block.plan);
  args.value_norm = attention.value_norm;
  args.clip = static_cast<float>(attention.clip);
  args.query_scale = attends_plainly(attention) ? 1 : static_cast<float>(scale_of_queries(attention));
  args.temperature = static_cast<float>(attention.temperature);
  args.temperature_length = attention.temperature_length;
  args.first = rows.first;
  args.position = rows.position;
  args.out = runner.activations.arranged.as<float>() + rows.row * width_of(attention);
  args.store = attention.keys_of ? nullptr : store;
  args.overlap = runner.options.overlap && rows.count == 1;
  kernels::arrange_heads_cuda(args, runner.stream);
  return {args.out, rows.count, width_of(attention), args.heads};
}

__half* out_of(LayerRunner& runner, const AttentionConfig& attention, int64_t row) {
  return runner.activations.attended.as<__half>() + row * attention.heads * attention.head_dim;
}

void attend_plainly(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows, const kernels::QkvRows& qkv,
                    const kernels::PagedLayer& layer) {
  const AttentionConfig& attention = block.plan.attention;
  const double usual = 1 / std::sqrt(static_cast<double>(attention.head_dim));
  kernels::PlainAttentionArgs args;
  args.qkv = qkv;
  args.layer = layer;
  args.first = rows.first;
  args.position = rows.position;
  args.window = attention.window;
  args.scale = static_cast<float>(attention.scale == 0 ? usual : attention.scale);
  args.soft_cap = static_cast<float>(attention.soft_cap);
  args.sinks = block.vector(model::VectorRole::sinks);
  args.out = out_of(runner, attention, rows.row);
  args.overlap = runner.options.overlap && rows.count == 1;
  kernels::plain_attention_cuda(args, runner.stream);
}

}  // namespace

bool attends_plainly(const AttentionConfig& attention) {
  return attention.soft_cap != 0 || attention.head_dim > kernels::kv_most_dim || attention.keys_of.has_value();
}

AttentionConfig usual_attention(const model::ModelConfig& config) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const AttentionConfig attention = config.attention_of(layer);
    if (!config.has_delta_net(layer) && attention.rope.partial_rotary_factor != 0) return attention;
  }
  return config.attention_of(0);
}

bool has_usual_heads(const model::Block& block, const AttentionConfig& usual) {
  const AttentionConfig& attention = block.attention;
  const bool same_angles = attention.rope == usual.rope && attention.head_dim == usual.head_dim;
  const bool own_keys = !attention.keys_of && !attention.keys_are_values && !attention.value_norm;
  return same_angles && own_keys && !attends_plainly(attention) && std::abs(scale_of_queries(attention) - 1) < 1e-9 &&
         attention.temperature == 0 && attention.clip == 0 && !attention.rope.neighbours &&
         attention.rope.partial_rotary_factor != 0 && !has_whole_norms(block);
}

void attend_rows(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows,
                 const kernels::HeadRotation& rotation, const kernels::PagedLayer& layer, const Widen& widen) {
  const AttentionConfig& attention = block.plan.attention;
  kernels::PrefillAttentionArgs args;
  if (has_usual_heads(block.plan, runner.usual)) {
    const int64_t stride = width_of(attention);
    args.qkv = {rows.products + rows.row * stride, rows.count, stride, static_cast<int>(attention.heads)};
    kernels::rotate_and_store_cuda(args.qkv, layer, with_norms(rotation, block, runner.config), rows.first,
                                   runner.stream);
  } else {
    args.qkv = arrange(runner, block, rows, rotation, &layer);
  }
  if (attends_plainly(attention)) return attend_plainly(runner, block, rows, args.qkv, layer);
  args.layer = layer.type == kernels::KvType::f16 ? layer : widen(layer, rows.first + rows.count);
  args.first = rows.first;
  args.window = attention.window;
  args.sinks = block.vector(model::VectorRole::sinks);
  args.out = out_of(runner, attention, rows.row);
  kernels::prefill_attention_cuda(args, runner.stream);
}

bool arrange_step(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows,
                  const kernels::HeadRotation& rotation, kernels::DecodeAttentionArgs& args) {
  if (attends_plainly(block.plan.attention)) {
    const auto qkv = arrange(runner, block, rows, rotation, &args.layer);
    attend_plainly(runner, block, rows, qkv, args.layer);
    return false;
  }
  args.qkv = arrange(runner, block, rows, rotation, nullptr).data;
  args.rotation = {};
  return true;
}

}  // namespace w4q::decoder_cuda
