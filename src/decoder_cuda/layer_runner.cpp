#include "decoder_cuda/layer_runner.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace w4q::decoder_cuda {

using device::DeviceBuffer;

namespace {

/// What no kernel of the decoder does; empty: it runs.
std::string_view not_on_gpu(const model::Block& block, const model::ModelConfig& config) {
  using model::BlockKind;
  if (block.kind == BlockKind::delta_net) return "a gated delta net";
  if (block.kind == BlockKind::mixture) return "a mixture of experts";
  if (block.kind == BlockKind::layer_embedding) return "embeddings of its own";
  if (block.norm(model::NormRole::output) != nullptr) return "norms of its outputs";
  if (block.norm(model::NormRole::input) == nullptr) return "no norm of its inputs";
  if (block.output_scale != 1 || !block.vectors.empty()) return "a scale of its outputs";
  if (block.kind == BlockKind::gated_mlp) {
    if (block.gating.activation != model::Activation::silu) return "another activation than silu";
    return block.groups.front().linears.size() == 2 ? "" : "gate and up as one matrix";
  }
  const model::AttentionConfig& attention = block.attention;
  if (block.groups.front().linears.size() != 3) return "other matrices than q, k and v";
  if (attention.head_dim != config.head_dim || attention.kv_heads != config.kv_heads) return "heads of its own";
  if (attention.scale != 0 || attention.soft_cap != 0 || attention.temperature != 0)
    return "a scale of attention of its own";
  if (attention.output_gate || attention.sinks || attention.value_norm) return "gates, sinks or norms of its values";
  if (attention.rope.neighbours || attention.rope != config.rope) return "a rotary embedding of its own";
  if (attention.rope.type == model::RopeType::longrope) return "longrope";
  for (const auto role : {model::NormRole::query, model::NormRole::key}) {
    if (const auto* norm = block.norm(role); norm != nullptr && norm->size != attention.head_dim)
      return "norms of all heads";
  }
  return "";
}

}  // namespace

void require_gpu_decoder(const model::ModelConfig& config) {
  if (config.embedding_scale != 1 || config.logit_scale != 1 || config.logit_cap != 0) {
    throw Error(ErrorCode::unsupported, concat(config.architecture_name, ": the GPU decodes none with scaled logits"))
        .hint("--device cpu");
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& block : model::layer_plan(config, layer).blocks) {
      const std::string_view what = not_on_gpu(block, config);
      if (what.empty()) continue;
      throw Error(ErrorCode::unsupported, concat(block.groups.front().name(), ": the GPU decodes no block with ", what))
          .hint("--device cpu");
    }
  }
}

Activations::Activations(const device::Context& gpu, std::span<const CudaLayer> layers, int64_t rows) {
  int64_t hidden = 0, qkv_width = 0, attended_width = 0, gate_up_width = 0, gated_width = 0;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) {
      const CudaLinear &first = block.groups.front(), &last = block.groups.back();
      const bool attends = block.plan.kind == model::BlockKind::attention;
      int64_t& products = attends ? qkv_width : gate_up_width;
      int64_t& mixed = attends ? attended_width : gated_width;
      hidden = std::max(hidden, first.k);
      products = std::max(products, first.n);
      mixed = std::max(mixed, last.k);
    }
  }
  normed = device_matrix<__half>(gpu, rows, hidden);
  qkv = device_matrix<float>(gpu, rows, qkv_width);
  attended = device_matrix<__half>(gpu, rows, attended_width);
  gate_up = device_matrix<__half>(gpu, rows, gate_up_width);
  gated = device_matrix<__half>(gpu, rows, gated_width);
}

LayerRunner::LayerRunner(const model::ModelConfig& config_, std::span<const CudaLayer> layers,
                         std::span<const CudaLinear* const> linears, const LayerRunnerOptions& options_,
                         const device::Stream& stream_)
    : config(config_),
      options(options_),
      stream(stream_),
      multiplier(linears, options.product_rows, stream, options.int8_activations),
      activations(stream.context(), layers, options.rows) {
  multiplier.set_overlap(options.overlap);
  for (auto& norm : norms)
    norm = device_matrix<float>(stream.context(), kernels::norm_state_floats(config.hidden_size), 1);
}

kernels::NormArgs LayerRunner::norm_args(const float* weight, __half* out) const {
  kernels::NormArgs args;
  args.x = residual;
  args.weight = weight;
  args.eps = static_cast<float>(config.rms_norm_eps);
  args.rows = rows;
  args.cols = config.hidden_size;
  args.out = out;
  args.overlap = options.overlap;
  return args;
}

void LayerRunner::normalize(const float* weight) {
  if (fused) return;
  kernels::NormArgs args = norm_args(weight, activations.normed.as<__half>());
  if (rows == 1) args.state = norms[norm_at].as<float>();
  kernels::rms_norm_cuda(args, stream);
}

bool LayerRunner::can_fuse(const CudaLinear& from, const CudaLinear& to) const {
  return options.fuse && fuses(from) && fuses(to);
}

void LayerRunner::add_product(const CudaLinear& linear, const DeviceBuffer& x, const NormedProduct& next) {
  fused = rows == 1 && next.linear != nullptr && can_fuse(linear, *next.linear);
  if (!fused) return multiplier.multiply_residual(linear, x.as<__half>(), rows, residual);
  const size_t after = 1 - norm_at;
  const NextNorm norm{next.norm, norms[norm_at].as<float>(), norms[after].as<float>(), activations.normed.as<__half>(),
                      static_cast<float>(config.rms_norm_eps)};
  multiplier.multiply_residual(linear, x.as<__half>(), rows, residual, &norm);
  norm_at = after;
}

InputNorm LayerRunner::input_norm() {
  if (!fused) return {};
  return {norms[norm_at].as<float>(), static_cast<float>(config.rms_norm_eps)};
}

void LayerRunner::observe(const CudaLinear& linear, const DeviceBuffer& input, const CudaObserver* observer) const {
  if (!observer || !observer->linear_input) return;
  observer->linear_input(linear.names, {input.data(), DType::f16, rows, linear.k, &stream});
}

void LayerRunner::run_block(const CudaBlock& block, const Attend& attend, const CudaObserver* observer,
                            const NormedProduct& next) {
  const auto [first, norm] = block.entry();
  const CudaLinear& last = block.groups.back();
  const bool attends = block.plan.kind == model::BlockKind::attention;
  const DeviceBuffer& mixed = attends ? activations.attended : activations.gated;
  const auto* const normed = activations.normed.as<__half>();
  normalize(norm);
  observe(*first, activations.normed, observer);
  if (attends) {
    multiplier.multiply(*first, normed, rows, activations.qkv.as<float>(), input_norm());
    attend(block);
  } else {
    multiplier.multiply_gated(*first, normed, rows, activations.gate_up.as<__half>(), activations.gated.as<__half>(),
                              input_norm());
  }
  observe(last, mixed, observer);
  add_product(last, mixed, next);
}

void LayerRunner::run(const CudaLayer& layer, const Attend& attend, const CudaObserver* observer,
                      const NormedProduct& behind) {
  for (size_t i = 0; i < layer.blocks.size(); ++i) {
    const NormedProduct next = i + 1 < layer.blocks.size() ? layer.blocks[i + 1].entry() : behind;
    // An observer sees complete inputs.
    run_block(layer.blocks[i], attend, observer, observer != nullptr ? NormedProduct{} : next);
  }
}

kernels::HeadRotation with_norms(kernels::HeadRotation rotation, const CudaBlock& block,
                                 const model::ModelConfig& config) {
  rotation.q_norm = block.norm(model::NormRole::query);
  rotation.k_norm = block.norm(model::NormRole::key);
  rotation.eps = static_cast<float>(config.rms_norm_eps);
  return rotation;
}

}  // namespace w4q::decoder_cuda
