#include <algorithm>

#include "decoder_cuda/decoder_impl.h"
#include "kernels/elementwise/elementwise_cuda.h"

namespace w4q::decoder_cuda {

using device::DeviceBuffer;
using kernels::StepState;

void CudaDecoder::Impl::upload_ids(std::span<const int32_t> ids) {
  stream.synchronize();  // the chunk before may still be copied
  const auto bytes = std::as_bytes(ids);
  std::ranges::copy(bytes, staged_ids.bytes().begin());
  ids_on_gpu.upload(staged_ids.bytes().first(bytes.size()), stream);
}

void CudaDecoder::Impl::final_norm(__half* out, float* out_fp32) {
  if (runner.fused) return;
  kernels::NormArgs args = runner.norm_args(model.final_norm(), out);
  args.out_fp32 = out_fp32;
  kernels::rms_norm_cuda(args, stream);
}

NormedProduct CudaDecoder::Impl::behind(size_t layer) const {
  const auto& layers = model.layers();
  if (layer + 1 == layers.size()) return {&model.head(), model.final_norm()};
  return layers[layer + 1].blocks.front().entry();
}

int64_t CudaDecoder::Impl::norm_launches() const {
  const auto& layers = model.layers();
  int64_t launches = 1;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto& blocks = layers[i].blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const NormedProduct next = b + 1 < blocks.size() ? blocks[b + 1].taken_over() : behind(i);
      const bool takes_over = !blocks[b].mixture && next.linear != nullptr;
      launches += takes_over && runner.can_fuse(blocks[b].groups.back(), *next.linear) ? 0 : 1;
    }
  }
  return launches;
}

void CudaDecoder::Impl::observe_hidden(int64_t index, int64_t rows, const CudaObserver* observer) {
  if (!observer || !observer->hidden) return;
  observer->hidden(index, {residual.data(), DType::f32, rows, config.hidden_size, &stream});
}

void CudaDecoder::Impl::attend_many(size_t index, const CudaBlock& block, const kernels::QkvRows& qkv, int64_t first) {
  const kernels::PagedLayer layer = keys_of(index);
  kernels::rotate_and_store_cuda(qkv, layer, with_norms(rope.rotation(first), block, config), first, stream);
  kernels::PrefillAttentionArgs args;
  args.qkv = qkv;
  args.layer = layer;
  args.first = first;
  args.window = block.plan.attention.window;
  args.out = runner.activations.attended.as<__half>();
  if (layer.type != kernels::KvType::f16) {
    const auto bytes =
        static_cast<size_t>(cache.pages() * config.kv_heads *
                            kernels::kv_head_page_bytes(kernels::KvType::f16, kernels::kv_padded_dim(config.head_dim)));
    if (wide_keys.size() < bytes) {
      wide_keys = DeviceBuffer(gpu, bytes);
      wide_values = DeviceBuffer(gpu, bytes);
    }
    kernels::widen_pages_cuda(layer, first + qkv.rows, wide_keys.data(), wide_values.data(), stream);
    args.layer.keys = wide_keys.data();
    args.layer.values = wide_values.data();
    args.layer.table = nullptr;
    args.layer.type = kernels::KvType::f16;
  }
  kernels::prefill_attention_cuda(args, stream);
}

void CudaDecoder::Impl::attend_single(size_t index, const CudaBlock& block, const int32_t* at,
                                      const kernels::HeadRotation& rotation) {
  kernels::DecodeAttentionArgs args;
  args.qkv = split_gates(runner, block);
  args.heads = static_cast<int>(config.heads);
  args.layer = keys_of(index);
  args.rotation = with_norms(rotation, block, config);
  args.rotation.single = true;
  args.position = at;
  args.window = block.plan.attention.window;
  args.out = runner.activations.attended.as<__half>();
  args.workspace = attention_workspace.data();
  args.overlap = options.overlap;
  args.capacity = options.capacity;
  args.delta = options.kv.delta;
  if (options.kv.prunes()) args.kept = kept.as<int32_t>() + static_cast<int64_t>(index) * config.heads;
  kernels::decode_attention_cuda(args, stream);
  apply_gates(runner, block);
}

kernels::DeltaMemory CudaDecoder::Impl::delta_memory(size_t layer, const kernels::DeltaShape& shape) {
  auto* const memory = delta[layer].as<float>();
  return {memory, memory + shape.history_size()};
}

void CudaDecoder::Impl::attend(size_t index, const CudaBlock& block, int64_t rows, int64_t first) {
  if (block.plan.kind == model::BlockKind::delta_net) {
    return run_delta_net(runner, block, delta_memory(index, block.plan.delta), !single_row && first == 0, 0, rows);
  }
  if (single_row) {
    kernels::HeadRotation rotation = rope.steps();
    rotation.cosine = step_cosine.as<float>();
    rotation.sine = step_sine.as<float>();
    return attend_single(index, block, &state.as<StepState>()->position, rotation);
  }
  if (rows == 1 && options.kv.prunes()) {
    return attend_single(index, block, positions.as<int32_t>() + first, rope.rotation(first));
  }
  const int64_t width = (config.heads + 2 * config.kv_heads) * config.head_dim;
  attend_many(index, block, {split_gates(runner, block), rows, width, static_cast<int>(config.heads)}, first);
  apply_gates(runner, block);
}

void CudaDecoder::Impl::run_layers(int64_t rows, int64_t first, const CudaObserver* observer) {
  const auto& layers = model.layers();
  size_t index = 0;
  const LayerRunner::Attend attend_here = [&](const CudaBlock& block) { attend(index, block, rows, first); };
  runner.begin(residual.as<float>(), rows);
  for (; index < layers.size(); ++index) {
    observe_hidden(static_cast<int64_t>(index), rows, observer);
    // The head of a step reads the last norm's output; that of a call comes later.
    const bool follows = index + 1 < layers.size() || single_row;
    runner.run(layers[index], attend_here, observer, follows ? behind(index) : NormedProduct{});
  }
}

void CudaDecoder::Impl::run_chunk(std::span<const int32_t> ids, int64_t row, const CudaObserver* observer) {
  const auto rows = static_cast<int64_t>(ids.size());
  upload_ids(ids);
  kernels::embed_cuda({model.embeddings(),
                       DType::f16,
                       ids_on_gpu.as<int32_t>(),
                       rows,
                       config.hidden_size,
                       residual.as<float>(),
                       false,
                       {}},
                      stream);
  run_layers(rows, position, observer);
  const bool observes = observer && observer->hidden;
  if (observes && observed.size() == 0) observed = device_matrix<float>(gpu, chunk, config.hidden_size);
  final_norm(hidden.as<__half>() + row * config.hidden_size, observes ? observed.as<float>() : nullptr);
  if (observes) {
    observer->hidden(config.layers, {observed.data(), DType::f32, rows, config.hidden_size, &stream});
  }
  position += rows;
}

void CudaDecoder::Impl::draw(const float* row) {
  kernels::sample_cuda({row, config.vocab_size, sampling, state.as<StepState>(),
                        reinterpret_cast<int32_t*>(drawn.bytes().data()), options.capacity + 1, options.overlap},
                       stream);
}

void CudaDecoder::Impl::mark_token() { events[static_cast<size_t>(steps) % token_events].record(stream); }

void CudaDecoder::Impl::launch_step() {
  const kernels::HeadRotation angles = rope.steps();
  auto* const now = state.as<StepState>();
  kernels::embed_cuda(
      {model.embeddings(),
       DType::f16,
       &now->token,
       1,
       config.hidden_size,
       residual.as<float>(),
       options.overlap,
       {angles.cosine, angles.sine, angles.pairs, &now->position, step_cosine.as<float>(), step_sine.as<float>()}},
      stream);
  single_row = true;
  run_layers(1, 0, nullptr);
  single_row = false;
  auto* const normed = runner.activations.normed.as<__half>();
  final_norm(normed, nullptr);
  runner.multiplier.multiply_logits(model.head(), normed, 1, logits.as<float>(), runner.input_norm());
  draw(logits.as<float>());
}

}  // namespace w4q::decoder_cuda
