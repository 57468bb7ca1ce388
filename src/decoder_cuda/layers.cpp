#include <algorithm>

#include "decoder_cuda/decoder_impl.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/elementwise/stream_cuda.h"

namespace w4q::decoder_cuda {

using device::DeviceBuffer;
using kernels::StepState;

void CudaDecoder::Impl::upload_ids(std::span<const int32_t> ids) {
  stream.synchronize();  // the chunk before may still be copied
  const auto bytes = std::as_bytes(ids);
  std::ranges::copy(bytes, staged_ids.bytes().begin());
  ids_on_gpu.upload(staged_ids.bytes().first(bytes.size()), stream);
}

void CudaDecoder::Impl::embed(const int32_t* ids, int64_t rows, bool overlap, const kernels::AngleRow& angles) {
  kernels::EmbedArgs args;
  args.table = model.embeddings();
  args.ids = ids;
  args.rows = rows;
  args.cols = config.hidden_size;
  args.x = residual.as<float>();
  args.scale = static_cast<float>(config.embedding_scale);
  args.angles = angles;
  // Never while the step before still runs: attention reads the position and the cache as soon as its launch begins.
  kernels::embed_cuda(args, stream);
  const auto& own = model.layer_embeddings();
  if (!own) return;
  auto* const rounded = runner.activations.normed.as<__half>();
  kernels::round_stream_cuda(residual.as<float>(), rows * config.hidden_size, rounded, overlap, stream);
  runner.multiplier.multiply(own->projection, rounded, rows, projected.as<float>());
  kernels::EmbedLayersArgs layers;
  layers.projected = projected.as<float>();
  layers.table = own->table.as<__half>();
  layers.ids = ids;
  layers.norm = own->norm.as<float>();
  layers.eps = static_cast<float>(config.rms_norm_eps);
  layers.rows = rows;
  layers.layers = config.layers;
  layers.size = config.layer_embedding_size;
  layers.hidden = config.hidden_size;
  layers.out = layer_embeddings.as<float>();
  layers.overlap = overlap;
  kernels::embed_layers_cuda(layers, stream);
  runner.layer_embeddings = layer_embeddings.as<float>();
}

void CudaDecoder::Impl::finish_logits(int64_t rows) {
  if (config.logit_scale == 1 && config.logit_cap == 0) return;
  kernels::cap_logits_cuda(logits.as<float>(), rows * config.vocab_size, static_cast<float>(config.logit_scale),
                           static_cast<float>(config.logit_cap), options.overlap && rows == 1, stream);
}

void CudaDecoder::Impl::final_norm(__half* out, float* out_fp32) {
  if (runner.fused) return;
  kernels::NormArgs args = runner.norm_args(model.final_norm(), out);
  args.out_fp32 = out_fp32;
  kernels::rms_norm_cuda(args, stream);
}

NormBetween CudaDecoder::Impl::behind(size_t layer) const {
  const auto& layers = model.layers();
  if (layer + 1 == layers.size()) return {fuses(model.head()) ? model.final_norm() : nullptr};
  return layers[layer + 1].blocks.front().taken_over();
}

int64_t CudaDecoder::Impl::norm_launches() const {
  const auto& layers = model.layers();
  int64_t launches = 1;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto& blocks = layers[i].blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const NormBetween next = b + 1 < blocks.size() ? blocks[b + 1].taken_over() : behind(i);
      launches += runner.can_fuse(blocks[b], next) ? 0 : 1;
    }
  }
  return launches;
}

void CudaDecoder::Impl::observe_hidden(int64_t index, int64_t rows, const CudaObserver* observer) {
  if (!observer || !observer->hidden) return;
  observer->hidden(index, {residual.data(), DType::f32, rows, config.hidden_size, &stream});
}

kernels::PagedLayer CudaDecoder::Impl::widen(const kernels::PagedLayer& layer, int64_t length) {
  const int dim = kernels::kv_padded_dim(layer.head_dim);
  const auto bytes =
      static_cast<size_t>(cache.pages() * layer.kv_heads * kernels::kv_head_page_bytes(kernels::KvType::f16, dim));
  if (wide_keys.size() < bytes) {
    wide_keys = DeviceBuffer(gpu, bytes);
    wide_values = DeviceBuffer(gpu, bytes);
  }
  kernels::widen_pages_cuda(layer, length, wide_keys.data(), wide_values.data(), stream);
  kernels::PagedLayer wide = layer;
  wide.keys = wide_keys.data();
  wide.values = wide_values.data();
  wide.table = nullptr;
  wide.type = kernels::KvType::f16;
  return wide;
}

void CudaDecoder::Impl::attend_single(size_t index, const CudaBlock& block, const SequenceRows& rows,
                                      const int32_t* at) {
  const model::AttentionConfig& attention = block.plan.attention;
  kernels::DecodeAttentionArgs args;
  args.qkv = rows.products;
  args.heads = static_cast<int>(attention.heads);
  args.layer = keys_of(index, block);
  kernels::HeadRotation rotation = single_row ? ropes.steps(attention) : ropes.rotation(attention, rows.first);
  const bool as_it_is = has_usual_heads(block.plan, runner.usual);
  if (!as_it_is && !arrange_step(runner, block, rows, rotation, args)) return;
  if (as_it_is) {
    if (single_row) rotation.cosine = step_cosine.as<float>(), rotation.sine = step_sine.as<float>();
    args.rotation = with_norms(rotation, block, config);
  }
  args.rotation.single = true;
  args.position = at;
  args.window = attention.window;
  args.sinks = block.vector(model::VectorRole::sinks);
  args.out = runner.activations.attended.as<__half>();
  args.workspace = attention_workspace.data();
  args.overlap = options.overlap;
  args.capacity = options.capacity;
  args.delta = options.kv.delta;
  if (options.kv.prunes()) args.kept = kept.as<int32_t>() + static_cast<int64_t>(index) * config.heads;
  kernels::decode_attention_cuda(args, stream);
}

kernels::DeltaMemory CudaDecoder::Impl::delta_memory(size_t layer, const kernels::DeltaShape& shape) {
  auto* const memory = delta[layer].as<float>();
  return {memory, memory + shape.history_size()};
}

void CudaDecoder::Impl::attend(size_t index, const CudaBlock& block, int64_t rows, int64_t first) {
  if (block.plan.kind == model::BlockKind::delta_net) {
    return run_delta_net(runner, block, delta_memory(index, block.plan.delta), !single_row && first == 0, 0, rows);
  }
  SequenceRows sequence{.count = rows, .first = first, .products = split_gates(runner, block)};
  if (single_row) {
    sequence.position = &state.as<StepState>()->position;
    attend_single(index, block, sequence, sequence.position);
  } else if (rows == 1 && options.kv.prunes()) {
    attend_single(index, block, sequence, positions.as<int32_t>() + first);
  } else {
    attend_rows(runner, block, sequence, ropes.rotation(block.plan.attention, first), keys_of(index, block),
                [&](const kernels::PagedLayer& layer, int64_t length) { return widen(layer, length); });
  }
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
    runner.run(layers[index], attend_here, observer, follows ? behind(index) : NormBetween{});
  }
}

void CudaDecoder::Impl::run_chunk(std::span<const int32_t> ids, int64_t row, const CudaObserver* observer) {
  const auto rows = static_cast<int64_t>(ids.size());
  upload_ids(ids);
  embed(ids_on_gpu.as<int32_t>(), rows, false, {});
  run_layers(rows, position, observer);
  const bool observes = observer && observer->hidden;
  if (observes && observed.size() == 0) observed = device_matrix<float>(gpu, chunk, config.hidden_size);
  final_norm(hidden.as<__half>() + row * config.hidden_size, observes ? observed.as<float>() : nullptr);
  if (observes) {
    observer->hidden(config.layers, {observed.data(), DType::f32, rows, config.hidden_size, &stream});
  }
  position += rows;
}

void CudaDecoder::Impl::run_chunk_of_stage(std::span<const int32_t> ids, int64_t row, MatrixView<float> states,
                                           const model::LayerStage& stage) {
  const auto bytes = std::as_writable_bytes(std::span(states.data, static_cast<size_t>(states.rows * states.cols)));
  if (stage.first()) {
    upload_ids(ids);
    embed(ids_on_gpu.as<int32_t>(), states.rows, false, {});
  } else {
    stage.receive(states);
    residual.upload(bytes, stream);
  }
  // Whoever is watched leaves no sum to the norm behind it, which is another stage's.
  const CudaObserver watched;
  run_layers(states.rows, position, &watched);
  position += states.rows;
  if (stage.last()) return final_norm(hidden.as<__half>() + row * config.hidden_size, nullptr);
  residual.download(bytes, stream);
  stream.synchronize();
  stage.send(states);
}

void CudaDecoder::Impl::draw(const float* row) {
  kernels::sample_cuda({row, config.vocab_size, sampling, state.as<StepState>(),
                        reinterpret_cast<int32_t*>(drawn.bytes().data()), options.capacity + 1, options.overlap},
                       stream);
}

void CudaDecoder::Impl::mark_token() { events[static_cast<size_t>(steps) % token_events].record(stream); }

void CudaDecoder::Impl::launch_step() {
  const kernels::HeadRotation angles = ropes.steps(runner.usual);
  auto* const now = state.as<StepState>();
  embed(&now->token, 1, options.overlap,
        {angles.cosine, angles.sine, angles.pairs, &now->position, step_cosine.as<float>(), step_sine.as<float>()});
  single_row = true;
  run_layers(1, 0, nullptr);
  single_row = false;
  auto* const normed = runner.activations.normed.as<__half>();
  final_norm(normed, nullptr);
  runner.multiplier.multiply_logits(model.head(), normed, 1, logits.as<float>(), runner.input_norm());
  finish_logits(1);
  draw(logits.as<float>());
}

}  // namespace w4q::decoder_cuda
