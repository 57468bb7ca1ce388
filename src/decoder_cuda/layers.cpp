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
  activations.ids.upload(staged_ids.bytes().first(bytes.size()), stream);
}

kernels::HeadRotation CudaDecoder::Impl::with_norms(kernels::HeadRotation rotation, size_t layer) const {
  const CudaLayer& weights = model.layers()[layer];
  if (config.qk_norm) {
    rotation.q_norm = weights.q_norm.as<float>();
    rotation.k_norm = weights.k_norm.as<float>();
  }
  rotation.eps = static_cast<float>(config.rms_norm_eps);
  return rotation;
}

kernels::NormArgs CudaDecoder::Impl::norm_args(const float* weight, int64_t rows, __half* out) {
  kernels::NormArgs args;
  args.x = activations.residual.as<float>();
  args.weight = weight;
  args.eps = static_cast<float>(config.rms_norm_eps);
  args.rows = rows;
  args.cols = config.hidden_size;
  args.out = out;
  args.overlap = options.overlap;
  return args;
}

void CudaDecoder::Impl::normalize(const DeviceBuffer& weight, int64_t rows) {
  if (fused) return;
  kernels::NormArgs args = norm_args(weight.as<float>(), rows, activations.normed.as<__half>());
  if (rows == 1) args.state = norms[norm_at].as<float>();
  kernels::rms_norm_cuda(args, stream.get());
}

void CudaDecoder::Impl::final_norm(int64_t rows, __half* out, float* out_fp32) {
  if (fused) return;
  kernels::NormArgs args = norm_args(model.final_norm(), rows, out);
  args.out_fp32 = out_fp32;
  kernels::rms_norm_cuda(args, stream.get());
}

bool CudaDecoder::Impl::can_fuse(const CudaLinear& from, const CudaLinear& to) const {
  return options.fuse && fuses(from) && fuses(to);
}

CudaDecoder::Impl::Behind CudaDecoder::Impl::behind(size_t layer) const {
  const auto& layers = model.layers();
  if (layer + 1 == layers.size()) return {&model.head(), model.final_norm()};
  return {&layers[layer + 1].qkv, layers[layer + 1].input_norm.as<float>()};
}

int64_t CudaDecoder::Impl::norm_launches() const {
  const auto& layers = model.layers();
  int64_t launches = 1;
  for (size_t i = 0; i < layers.size(); ++i) {
    launches +=
        (can_fuse(layers[i].o, layers[i].gate_up) ? 0 : 1) + (can_fuse(layers[i].down, *behind(i).linear) ? 0 : 1);
  }
  return launches;
}

void CudaDecoder::Impl::add_product(const CudaLinear& linear, const DeviceBuffer& x, int64_t rows,
                                    const CudaLinear* next, const float* weight) {
  auto* const residual = activations.residual.as<float>();
  fused = rows == 1 && next != nullptr && can_fuse(linear, *next);
  if (!fused) return multiplier.multiply_residual(linear, x.as<__half>(), rows, residual);
  const size_t after = 1 - norm_at;
  const NextNorm norm{weight, norms[norm_at].as<float>(), norms[after].as<float>(), activations.normed.as<__half>(),
                      static_cast<float>(config.rms_norm_eps)};
  multiplier.multiply_residual(linear, x.as<__half>(), rows, residual, &norm);
  norm_at = after;
}

InputNorm CudaDecoder::Impl::input_norm() {
  if (!fused) return {};
  return {norms[norm_at].as<float>(), static_cast<float>(config.rms_norm_eps)};
}

void CudaDecoder::Impl::observe_hidden(int64_t index, int64_t rows, const CudaObserver* observer) {
  if (!observer || !observer->hidden) return;
  observer->hidden(index, {activations.residual.data(), DType::f32, rows, config.hidden_size, &stream});
}

void CudaDecoder::Impl::observe_input(const CudaLinear& linear, const DeviceBuffer& input, int64_t rows,
                                      const CudaObserver* observer) const {
  if (!observer || !observer->linear_input) return;
  observer->linear_input(linear.names, {input.data(), DType::f16, rows, linear.k, &stream});
}

void CudaDecoder::Impl::attend_many(size_t index, const kernels::QkvRows& qkv, const kernels::PagedLayer& layer,
                                    int64_t first) {
  kernels::rotate_and_store_cuda(qkv, layer, with_norms(rope.rotation(first), index), first, stream.get());
  kernels::PrefillAttentionArgs args;
  args.qkv = qkv;
  args.layer = layer;
  args.first = first;
  args.window = config.sliding_window[index];
  args.out = activations.attended.as<__half>();
  if (layer.type != kernels::KvType::f16) {
    const auto bytes =
        static_cast<size_t>(cache.pages() * config.kv_heads *
                            kernels::kv_head_page_bytes(kernels::KvType::f16, kernels::kv_padded_dim(config.head_dim)));
    if (wide_keys.size() < bytes) {
      wide_keys = DeviceBuffer(gpu, bytes);
      wide_values = DeviceBuffer(gpu, bytes);
    }
    kernels::widen_pages_cuda(layer, first + qkv.rows, wide_keys.data(), wide_values.data(), stream.get());
    args.layer.keys = wide_keys.data();
    args.layer.values = wide_values.data();
    args.layer.table = nullptr;
    args.layer.type = kernels::KvType::f16;
  }
  kernels::prefill_attention_cuda(args, stream.get());
}

void CudaDecoder::Impl::attend_single(size_t index, const int32_t* at, const kernels::HeadRotation& rotation) {
  kernels::DecodeAttentionArgs args;
  args.qkv = activations.qkv.as<float>();
  args.heads = static_cast<int>(config.heads);
  args.layer = cache.layer(static_cast<int64_t>(index));
  args.rotation = with_norms(rotation, index);
  args.rotation.single = true;
  args.position = at;
  args.window = config.sliding_window[index];
  args.out = activations.attended.as<__half>();
  args.workspace = attention_workspace.data();
  args.overlap = options.overlap;
  args.capacity = options.capacity;
  args.delta = options.kv.delta;
  if (options.kv.prunes()) args.kept = kept.as<int32_t>() + static_cast<int64_t>(index) * config.heads;
  kernels::decode_attention_cuda(args, stream.get());
}

void CudaDecoder::Impl::attend(size_t index, int64_t rows, int64_t first) {
  if (single_row) {
    kernels::HeadRotation rotation = rope.steps();
    rotation.cosine = step_cosine.as<float>();
    rotation.sine = step_sine.as<float>();
    return attend_single(index, &state.as<StepState>()->position, rotation);
  }
  if (rows == 1 && options.kv.prunes()) {
    return attend_single(index, positions.as<int32_t>() + first, rope.rotation(first));
  }
  const int64_t width = (config.heads + 2 * config.kv_heads) * config.head_dim;
  attend_many(index, {activations.qkv.as<float>(), rows, width, static_cast<int>(config.heads)},
              cache.layer(static_cast<int64_t>(index)), first);
}

void CudaDecoder::Impl::run_layer(size_t index, int64_t rows, int64_t first, const CudaObserver* observer) {
  const auto& layers = model.layers();
  const CudaLayer& weights = layers[index];
  normalize(weights.input_norm, rows);
  observe_input(weights.qkv, activations.normed, rows, observer);
  multiplier.multiply(weights.qkv, activations.normed.as<__half>(), rows, activations.qkv.as<float>(), input_norm());
  attend(index, rows, first);
  observe_input(weights.o, activations.attended, rows, observer);
  // An observer sees complete inputs.
  const bool alone = observer != nullptr;
  add_product(weights.o, activations.attended, rows, alone ? nullptr : &weights.gate_up,
              weights.post_attention_norm.as<float>());
  normalize(weights.post_attention_norm, rows);
  observe_input(weights.gate_up, activations.normed, rows, observer);
  multiplier.multiply_gated(weights.gate_up, activations.normed.as<__half>(), rows, activations.gate_up.as<__half>(),
                            activations.gated.as<__half>(), input_norm());
  observe_input(weights.down, activations.gated, rows, observer);
  // The head of a step reads the last norm's output; that of a call comes later.
  const bool follows = !alone && (index + 1 < layers.size() || single_row);
  const auto [next, norm] = behind(index);
  add_product(weights.down, activations.gated, rows, follows ? next : nullptr, norm);
}

void CudaDecoder::Impl::run_chunk(std::span<const int32_t> ids, int64_t row, const CudaObserver* observer) {
  const auto rows = static_cast<int64_t>(ids.size());
  upload_ids(ids);
  kernels::embed_cuda({model.embeddings(),
                       DType::f16,
                       activations.ids.as<int32_t>(),
                       rows,
                       config.hidden_size,
                       activations.residual.as<float>(),
                       false,
                       {}},
                      stream.get());
  fused = false;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    observe_hidden(layer, rows, observer);
    run_layer(static_cast<size_t>(layer), rows, position, observer);
  }
  const bool observes = observer && observer->hidden;
  if (observes && observed.size() == 0) observed = device_matrix<float>(gpu, chunk, config.hidden_size);
  final_norm(rows, hidden.as<__half>() + row * config.hidden_size, observes ? observed.as<float>() : nullptr);
  if (observes) {
    observer->hidden(config.layers, {observed.data(), DType::f32, rows, config.hidden_size, &stream});
  }
  position += rows;
}

void CudaDecoder::Impl::draw(const float* row) {
  kernels::sample_cuda({row, config.vocab_size, sampling, state.as<StepState>(),
                        reinterpret_cast<int32_t*>(drawn.bytes().data()), options.capacity + 1, options.overlap},
                       stream.get());
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
       activations.residual.as<float>(),
       options.overlap,
       {angles.cosine, angles.sine, angles.pairs, &now->position, step_cosine.as<float>(), step_sine.as<float>()}},
      stream.get());
  fused = false;
  single_row = true;
  for (int64_t layer = 0; layer < config.layers; ++layer) run_layer(static_cast<size_t>(layer), 1, 0, nullptr);
  single_row = false;
  final_norm(1, activations.normed.as<__half>(), nullptr);
  multiplier.multiply_logits(model.head(), activations.normed.as<__half>(), 1, logits.as<float>(), input_norm());
  draw(logits.as<float>());
}

}  // namespace w4q::decoder_cuda
