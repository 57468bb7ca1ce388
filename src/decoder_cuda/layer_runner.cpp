#include "decoder_cuda/layer_runner.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace w4q::decoder_cuda {

using device::DeviceBuffer;

namespace {

/// What no kernel of the decoder does; empty: it runs.
std::string_view not_on_gpu(const model::Block& block, const model::ModelConfig& config) {
  using model::BlockKind;
  if (block.kind == BlockKind::layer_embedding) return "embeddings of its own";
  if (block.norm(model::NormRole::output) != nullptr) return "norms of its outputs";
  if (block.norm(model::NormRole::input) == nullptr) return "no norm of its inputs";
  if (block.output_scale != 1) return "a scale of its outputs";
  if (block.vector(model::VectorRole::layer_scale) != nullptr) return "a scale of the stream behind it";
  if (block.kind == BlockKind::delta_net)
    return kernels::takes_delta_net(block.delta) ? "" : "a delta net of such heads";
  const bool silu = block.gating.activation == model::Activation::silu;
  if (block.kind == BlockKind::mixture) {
    const model::MixtureConfig& mixture = block.mixture;
    if (block.norm(model::NormRole::expert_input) != nullptr) return "norms of its experts";
    if (mixture.experts > kernels::most_routed_experts || mixture.chosen > kernels::most_routed_places) {
      return "so many experts";
    }
    return silu || mixture.shared_intermediate == 0 ? "" : "another activation than silu";
  }
  if (block.kind == BlockKind::gated_mlp) {
    if (!silu) return "another activation than silu";
    return block.groups.front().linears.size() == 2 ? "" : "gate and up as one matrix";
  }
  const model::AttentionConfig& attention = block.attention;
  if (block.groups.front().linears.size() != 3) return "other matrices than q, k and v";
  if (attention.head_dim != config.head_dim || attention.kv_heads != config.kv_heads) return "heads of its own";
  if (attention.scale != 0 || attention.soft_cap != 0 || attention.temperature != 0)
    return "a scale of attention of its own";
  if (attention.sinks || attention.value_norm) return "sinks or norms of its values";
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
  int64_t hidden = 0, products = 0, attended_width = 0, gate_up_width = 0, gated_width = 0;
  int64_t split_width = 0, gate_width = 0, channels = 0, router_width = 0, shared_width = 0;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) {
      const model::Block& plan = block.plan;
      const CudaLinear &first = block.groups.front(), &last = block.groups.back();
      hidden = std::max(hidden, first.k);
      if (plan.kind == model::BlockKind::mixture) {
        router_width = std::max(router_width, first.n);
        if (block.groups.size() == 1) continue;
        shared_width = std::max(shared_width, last.n);
        gate_up_width = std::max(gate_up_width, block.groups[1].n);
        gated_width = std::max(gated_width, last.k);
      } else if (plan.kind == model::BlockKind::gated_mlp) {
        gate_up_width = std::max(gate_up_width, first.n);
        gated_width = std::max(gated_width, last.k);
      } else {
        products = std::max(products, first.n);
        attended_width = std::max(attended_width, last.k);
        if (plan.kind == model::BlockKind::delta_net) channels = std::max(channels, plan.delta.channels());
        if (!plan.attention.output_gate) continue;
        gate_width = std::max(gate_width, last.k);
        split_width = std::max(split_width, first.n - last.k);
      }
    }
  }
  normed = device_matrix<__half>(gpu, rows, hidden);
  qkv = device_matrix<float>(gpu, rows, products);
  attended = device_matrix<__half>(gpu, rows, attended_width);
  gate_up = device_matrix<__half>(gpu, rows, gate_up_width);
  gated = device_matrix<__half>(gpu, rows, gated_width);
  split = device_matrix<float>(gpu, rows, split_width);
  gates = device_matrix<float>(gpu, rows, gate_width);
  mixed = device_matrix<float>(gpu, rows, channels);
  routed = device_matrix<float>(gpu, rows, router_width);
  shared = device_matrix<float>(gpu, rows, shared_width);
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
  if (const auto all = mixtures_of(layers); !all.empty())
    mixtures.emplace(config, all, options.rows, multiplier, stream);
  for (auto& norm : norms)
    norm = device_matrix<float>(stream.context(), kernels::norm_state_floats(config.hidden_size), 1);
}

kernels::NormArgs LayerRunner::norm_args(const float* weight, __half* out) {
  kernels::NormArgs args;
  args.x = residual;
  args.weight = weight;
  args.eps = static_cast<float>(config.rms_norm_eps);
  args.rows = rows;
  args.cols = config.hidden_size;
  args.out = out;
  args.overlap = options.overlap;
  args.pending = std::exchange(pending, {});
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
  observe(linear, input, rows, observer);
}

void LayerRunner::observe(const CudaLinear& linear, const DeviceBuffer& input, int64_t count,
                          const CudaObserver* observer) const {
  if (!observer || !observer->linear_input) return;
  observer->linear_input(linear.names, {input.data(), DType::f16, count, linear.k, &stream});
}

/// The router, the experts that it chooses, and what every row goes through.
void LayerRunner::run_mixture(const CudaBlock& block, const CudaObserver* observer) {
  const CudaLinear& router = block.groups.front();
  const auto* const normed = activations.normed.as<__half>();
  normalize(block.norm(model::NormRole::input));
  observe(router, activations.normed, observer);
  multiplier.multiply(router, normed, rows, activations.routed.as<float>());
  MixtureScratch::Observe see;
  if (observer && observer->linear_input) {
    see = [&](const CudaLinear& linear, const DeviceBuffer& input, int64_t count) {
      observe(linear, input, count, observer);
    };
  }
  // A step leaves its sums to the norm behind it.
  kernels::PendingSum* const later = rows == 1 && observer == nullptr && block.mixture->routes() ? &pending : nullptr;
  mixtures->run(block.plan.mixture, block.plan.gating, *block.mixture, activations.routed.as<float>(), router.n, normed,
                rows, residual, see, later);
  if (block.groups.size() == 1) return;
  const CudaLinear &inputs = block.groups[1], &outputs = block.groups[2];
  observe(inputs, activations.normed, observer);
  multiplier.multiply_gated(inputs, normed, rows, activations.gate_up.as<__half>(), activations.gated.as<__half>());
  observe(outputs, activations.gated, observer);
  multiplier.multiply(outputs, activations.gated.as<__half>(), rows, activations.shared.as<float>());
  const bool gated = block.plan.groups.front().linears.size() > 1;
  const float* const gate = gated ? activations.routed.as<float>() + block.plan.mixture.experts : nullptr;
  if (later != nullptr) {
    later->shared = activations.shared.as<float>();
    later->gate = gate;
    return;
  }
  kernels::combine_cuda({.shared = activations.shared.as<float>(),
                         .gate = gate,
                         .gate_stride = router.n,
                         .rows = rows,
                         .cols = config.hidden_size,
                         .y = residual,
                         .overlap = options.overlap && rows == 1},
                        stream);
}

void LayerRunner::run_block(const CudaBlock& block, const Attend& attend, const CudaObserver* observer,
                            const NormedProduct& next) {
  if (block.mixture) {
    run_mixture(block, observer);
    fused = false;
    return;
  }
  const auto [first, norm] = block.entry();
  const CudaLinear& last = block.groups.back();
  const bool attends = block.plan.kind != model::BlockKind::gated_mlp;
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
    const NormedProduct next = i + 1 < layer.blocks.size() ? layer.blocks[i + 1].taken_over() : behind;
    // An observer sees complete inputs.
    run_block(layer.blocks[i], attend, observer, observer != nullptr ? NormedProduct{} : next);
  }
}

float* split_gates(LayerRunner& runner, const CudaBlock& block) {
  const model::AttentionConfig& attention = block.plan.attention;
  Activations& activations = runner.activations;
  if (!attention.output_gate) return activations.qkv.as<float>();
  kernels::split_gates_cuda({.products = activations.qkv.as<float>(),
                             .rows = runner.rows,
                             .heads = attention.heads,
                             .head_dim = attention.head_dim,
                             .behind = 2 * attention.kv_heads * attention.head_dim,
                             .qkv = activations.split.as<float>(),
                             .gates = activations.gates.as<float>(),
                             .overlap = runner.options.overlap && runner.rows == 1},
                            runner.stream);
  return activations.split.as<float>();
}

void apply_gates(LayerRunner& runner, const CudaBlock& block) {
  const model::AttentionConfig& attention = block.plan.attention;
  if (!attention.output_gate) return;
  kernels::sigmoid_multiply_cuda(runner.activations.attended.as<__half>(), runner.activations.gates.as<float>(),
                                 runner.rows * attention.heads * attention.head_dim,
                                 runner.options.overlap && runner.rows == 1, runner.stream);
}

void run_delta_net(LayerRunner& runner, const CudaBlock& block, const kernels::DeltaMemory& memory, bool begins,
                   int64_t first, int64_t count) {
  const kernels::DeltaShape& shape = block.plan.delta;
  const CudaLinear& projections = block.groups.front();
  Activations& activations = runner.activations;
  const bool parts = block.plan.groups.front().linears.size() == 4;
  kernels::delta_net_cuda({.shape = shape,
                           .order = parts ? kernels::DeltaOrder::parts : kernels::DeltaOrder::key_heads,
                           .rows = count,
                           .products = activations.qkv.as<float>() + first * projections.n,
                           .stride = projections.n,
                           .convolution = block.vector(model::VectorRole::convolution),
                           .rate = block.vector(model::VectorRole::decay),
                           .bias = block.vector(model::VectorRole::step_bias),
                           .norm = block.norm(model::NormRole::delta),
                           .eps = static_cast<float>(runner.config.rms_norm_eps),
                           .memory = memory,
                           .begins = begins,
                           .mixed = activations.mixed.as<float>() + first * shape.channels(),
                           .out = activations.attended.as<__half>() + first * shape.values(),
                           .overlap = runner.options.overlap && runner.rows == 1},
                          runner.stream);
}

kernels::HeadRotation with_norms(kernels::HeadRotation rotation, const CudaBlock& block,
                                 const model::ModelConfig& config) {
  rotation.q_norm = block.norm(model::NormRole::query);
  rotation.k_norm = block.norm(model::NormRole::key);
  rotation.eps = static_cast<float>(config.rms_norm_eps);
  return rotation;
}

}  // namespace w4q::decoder_cuda
