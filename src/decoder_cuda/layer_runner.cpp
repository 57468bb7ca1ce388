#include "decoder_cuda/layer_runner.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "decoder_cuda/attention.h"
#include "kernels/elementwise/stream_cuda.h"
#include "model/parameters.h"

namespace w4q::decoder_cuda {

using device::DeviceBuffer;

namespace {

/// What no kernel of the decoder does; empty: it runs.
std::string_view not_on_gpu(const model::Block& block) {
  using model::BlockKind;
  const kernels::Gating& gating = block.gating;
  if (block.kind == BlockKind::delta_net) {
    if (gating.activation != model::Activation::silu) return "a delta net whose hidden_act is not silu";
    return kernels::takes_delta_net(block.delta) ? "" : "a delta net of such heads";
  }
  const bool clamped = gating.activation == model::Activation::clamped_swiglu;
  if (clamped && gating.slope != kernels::Gating{}.slope) return "a swiglu_alpha but 1.702";
  if (block.kind == BlockKind::mixture) {
    const model::MixtureConfig& mixture = block.mixture;
    const bool fits = mixture.experts <= kernels::most_routed_experts && mixture.chosen <= kernels::most_routed_places;
    return fits ? "" : "so many experts";
  }
  return "";
}

/// Whether a product may make silu(gate) · up by itself.
bool is_swiglu(const model::Block& plan, const CudaLinear& linear) {
  return plan.gating.activation == model::Activation::silu && linear.gates() != kernels::GateOrder::none;
}

/// Whether the last product of a mixture's step adds up all that the mixture adds to the residual stream.
bool adds_up(const CudaBlock& block) {
  const bool is_all = block.groups.size() == 1 || block.mixture->joined;
  return block.mixture->adds_up() && is_all && !reads_several_norms(block.plan);
}

bool mixes_apart(const model::Block& plan) { return reads_several_norms(plan) || adds_apart(plan); }

}  // namespace

bool adds_apart(const model::Block& block) {
  return block.norm(model::NormRole::output) != nullptr || block.output_scale != 1 ||
         block.vector(model::VectorRole::layer_scale) != nullptr;
}

bool has_plain_blocks(const model::ModelConfig& config) {
  if (!model::has_dense_layers(config)) return false;
  const model::AttentionConfig usual = usual_attention(config);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& block : model::layer_plan(config, layer).blocks) {
      const bool as_usual = block.kind != model::BlockKind::attention || has_usual_heads(block, usual);
      if (adds_apart(block) || !as_usual || block.gating.activation != model::Activation::silu ||
          block.norm(model::NormRole::input) == nullptr)
        return false;
    }
  }
  return true;
}

void require_gpu_decoder(const model::ModelConfig& config) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& block : model::layer_plan(config, layer).blocks) {
      const std::string_view what = not_on_gpu(block);
      if (what.empty()) continue;
      throw Error(ErrorCode::unsupported, concat(block.groups.front().name(), ": the GPU decodes no block with ", what))
          .hint("--device cpu");
    }
  }
}

namespace {

/// The widest that each of them gets.
struct Widths {
  int64_t hidden = 0, products = 0, attended = 0, arranged = 0, gate_up = 0, gated = 0, both = 0, split = 0, gates = 0,
          channels = 0, router = 0, shared = 0, added = 0, apart = 0;

  void include_gated(const model::Block& plan, const CudaLinear& first, const CudaLinear& last) {
    auto& inputs = is_swiglu(plan, first) ? gate_up : both;
    inputs = std::max(inputs, first.n);
    gated = std::max(gated, last.k);
  }

  void include_attention(const CudaBlock& block, const model::AttentionConfig& usual) {
    const model::AttentionConfig& attention = block.plan.attention;
    const int64_t heads = attention.heads * attention.head_dim;
    const int64_t all = heads + 2 * attention.kv_heads * attention.head_dim;
    if (!has_usual_heads(block.plan, usual)) arranged = std::max(arranged, all);
    if (!attention.output_gate) return;
    gates = std::max(gates, heads);
    split = std::max(split, all);
  }

  void include(const CudaBlock& block, const model::AttentionConfig& usual, int64_t stream) {
    const model::Block& plan = block.plan;
    const CudaLinear &first = block.groups.front(), &last = block.groups.back();
    hidden = std::max(hidden, first.k);
    if (adds_apart(plan)) added = stream;
    switch (plan.kind) {
      case model::BlockKind::mixture:
        router = std::max(router, first.n);
        if (mixes_apart(plan)) added = apart = stream;
        if (block.groups.size() == 1) return;
        shared = std::max(shared, last.n);
        return include_gated(plan, block.groups[1], last);
      case model::BlockKind::gated_mlp:
        return include_gated(plan, first, last);
      case model::BlockKind::layer_embedding:
        products = std::max(products, first.n);
        gated = std::max(gated, last.k);
        return;
      case model::BlockKind::delta_net:
        channels = std::max(channels, kernels::delta_scratch(plan.delta));
        break;
      default:
        include_attention(block, usual);
    }
    products = std::max(products, first.n);
    attended = std::max(attended, last.k);
  }
};

}  // namespace

Activations::Activations(const device::Context& gpu, const model::ModelConfig& config,
                         const model::AttentionConfig& usual, std::span<const CudaLayer> layers, int64_t rows) {
  Widths widths;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) widths.include(block, usual, config.hidden_size);
  }
  normed = device_matrix<__half>(gpu, rows, widths.hidden);
  qkv = device_matrix<float>(gpu, rows, widths.products);
  attended = device_matrix<__half>(gpu, rows, widths.attended);
  arranged = device_matrix<float>(gpu, rows, widths.arranged);
  gate_up = device_matrix<__half>(gpu, rows, widths.gate_up);
  gated = device_matrix<__half>(gpu, rows, widths.gated);
  both = device_matrix<float>(gpu, rows, widths.both);
  split = device_matrix<float>(gpu, rows, widths.split);
  gates = device_matrix<float>(gpu, rows, widths.gates);
  mixed = device_matrix<float>(gpu, rows, widths.channels);
  routed = device_matrix<float>(gpu, rows, widths.router);
  parts = device_matrix<float>(gpu, (widths.hidden + 63) / 64, widths.router);
  shared = device_matrix<float>(gpu, rows, widths.shared);
  added = device_matrix<float>(gpu, rows, widths.added);
  routing = device_matrix<__half>(gpu, rows, widths.apart);
  expert_input = device_matrix<__half>(gpu, rows, widths.apart);
  experts = device_matrix<float>(gpu, rows, widths.apart);
}

LayerRunner::LayerRunner(const model::ModelConfig& config_, std::span<const CudaLayer> layers,
                         std::span<const CudaLinear* const> linears, const LayerRunnerOptions& options_,
                         const device::Stream& stream_)
    : config(config_),
      usual(usual_attention(config)),
      options(options_),
      stream(stream_),
      multiplier(linears, options.product_rows, stream, options.int8_activations),
      activations(stream.context(), config, usual, layers, options.rows) {
  multiplier.set_overlap(options.overlap);
  if (const auto all = mixtures_of(layers); !all.empty()) {
    mixtures.emplace(config, all, options.rows, multiplier, stream);
    multiplier.set_beside_routed(std::ranges::any_of(all, &CudaMixture::routes));
  }
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
  auto* const out = activations.normed.as<__half>();
  if (weight == nullptr) {
    return kernels::round_stream_cuda(residual, rows * config.hidden_size, out, step_overlaps(), stream);
  }
  kernels::NormArgs args = norm_args(weight, out);
  if (rows == 1) args.state = norms[norm_at].as<float>();
  kernels::rms_norm_cuda(args, stream);
}

void LayerRunner::normalize_to(const float* weight, __half* out) {
  kernels::rms_norm_cuda(norm_args(weight, out), stream);
}

void LayerRunner::multiply_gated(const model::Block& plan, const CudaLinear& linear, const __half* x, InputNorm norm) {
  auto* const out = activations.gated.as<__half>();
  if (is_swiglu(plan, linear)) {
    return multiplier.multiply_gated(linear, x, rows, activations.gate_up.as<__half>(), out, norm);
  }
  auto* const both = activations.both.as<float>();
  multiplier.multiply(linear, x, rows, both, norm);
  const bool turns = linear.gates() == kernels::GateOrder::turns;
  kernels::gate_multiply_cuda(plan.gating, both, rows, linear.n / 2,
                              turns ? kernels::GateColumns::turns : kernels::GateColumns::halves, out, step_overlaps(),
                              stream);
}

void LayerRunner::embed_layer(const CudaBlock& block) {
  const int64_t size = config.layer_embedding_size;
  ensure(layer_embeddings != nullptr, "a layer with embeddings of its own got none");
  const int64_t layer = model::layer_numbers(block.plan.groups.front().name()).layer;
  kernels::gate_rows_cuda(block.plan.gating,
                          {.gate = activations.qkv.as<float>(),
                           .gate_stride = size,
                           .up = layer_embeddings + (of_present_layer ? 0 : layer * size),
                           .up_stride = of_present_layer ? size : config.layers * size,
                           .rows = rows,
                           .cols = size,
                           .out = activations.gated.as<__half>(),
                           .overlap = step_overlaps()},
                          stream);
}

void LayerRunner::add_apart(const CudaBlock& block) {
  fused = false;
  kernels::add_normed_cuda({.x = activations.added.as<float>(),
                            .weight = block.norm(model::NormRole::output),
                            .eps = static_cast<float>(config.rms_norm_eps),
                            .rows = rows,
                            .cols = config.hidden_size,
                            .factor = static_cast<float>(block.plan.output_scale),
                            .stream_scale = block.vector(model::VectorRole::layer_scale),
                            .y = residual,
                            .overlap = step_overlaps()},
                           stream);
}

bool LayerRunner::can_fuse(const CudaBlock& from, const NormBetween& next) const {
  if (!options.fuse || next.weight == nullptr || adds_apart(from.plan)) return false;
  return from.mixture ? adds_up(from) : fuses(from.groups.back());
}

NextNorm LayerRunner::leave_norm(const NormBetween& next) {
  const size_t before = std::exchange(norm_at, 1 - norm_at);
  fused = true;
  return {next.weight, norms[before].as<float>(), norms[norm_at].as<float>(), activations.normed.as<__half>(),
          static_cast<float>(config.rms_norm_eps)};
}

void LayerRunner::add_product(const CudaBlock& block, const DeviceBuffer& x, const NormBetween& next) {
  const CudaLinear& linear = block.groups.back();
  fused = in_parts = false;
  if (rows != 1 || !can_fuse(block, next)) {
    return multiplier.multiply_residual(linear, x.as<__half>(), rows, residual);
  }
  const NextNorm norm = leave_norm(next);
  kernels::TailProduct tail;
  in_parts = next.router != nullptr && multiplier.leaves_tail(linear, *next.router);
  if (in_parts) {
    tail = {next.router->products.front().linear.passes.front().codes, static_cast<int>(next.router->n),
            activations.parts.as<float>()};
  }
  multiplier.multiply_residual(linear, x.as<__half>(), rows, residual, &norm, tail);
}

InputNorm LayerRunner::input_norm() {
  if (!fused) return {};
  return {norms[norm_at].as<float>(), static_cast<float>(config.rms_norm_eps)};
}

bool LayerRunner::observe(const CudaLinear& linear, const DeviceBuffer& input, const CudaObserver* observer) const {
  if (!observer || !observer->linear_input) return false;
  observer->linear_input(linear.names, {input.data(), DType::f16, rows, linear.k, &stream});
  return observer->ends_there && observer->ends_there(linear.names);
}

void LayerRunner::run_shared(const CudaBlock& block, const InputNorm& norm, const CudaObserver* observer) {
  const CudaLinear &inputs = block.groups[1], &outputs = block.groups[2];
  observe(inputs, activations.normed, observer);
  multiply_gated(block.plan, inputs, activations.normed.as<__half>(), norm);
  observe(outputs, activations.gated, observer);
  multiplier.multiply(outputs, activations.gated.as<__half>(), rows, activations.shared.as<float>());
}

/// The router, the experts that it chooses, and what every row goes through.
void LayerRunner::run_mixture(const CudaBlock& block, const CudaObserver* observer, const NormBetween& next) {
  const CudaLinear& router = block.groups.front();
  const bool apart = mixes_apart(block.plan), own_norms = reads_several_norms(block.plan);
  normalize(block.norm(model::NormRole::input));
  if (own_norms) {
    normalize_to(block.vector(model::VectorRole::router_scale), activations.routing.as<__half>());
    normalize_to(block.norm(model::NormRole::expert_input), activations.expert_input.as<__half>());
  }
  const DeviceBuffer& routing = own_norms ? activations.routing : activations.normed;
  const DeviceBuffer& expert_input = own_norms ? activations.expert_input : activations.normed;
  if (observe(router, routing, observer)) return;
  const bool parts = std::exchange(in_parts, false);
  if (!parts) multiplier.multiply(router, routing.as<__half>(), rows, activations.routed.as<float>());
  MixtureScratch::Observe see;
  if (observer && observer->linear_input) {
    see = [&](const CudaLinear& linear, const __half* input, int64_t count) {
      observer->linear_input(linear.names, {input, DType::f16, count, linear.k, &stream});
    };
  }
  // A step adds its sums up in the last product, or leaves them to the norm behind it.
  const bool by_itself = rows == 1 && observer == nullptr && block.mixture->routes() && !apart;
  const bool defers = by_itself && !block.mixture->adds_up();
  MixtureScratch::Step step{.norm = input_norm(), .later = defers ? &pending : nullptr};
  if (parts) step.parts = activations.parts.as<float>();
  NextNorm behind;
  if (fused = by_itself && can_fuse(block, next); fused) {
    behind = leave_norm(next);
    step.next = &behind;
  }
  float* const sum = apart ? activations.experts.as<float>() : residual;
  if (apart) activations.experts.fill(0, stream);
  mixtures->run(block.plan, *block.mixture, activations.routed.as<float>(), router.n, expert_input.as<__half>(), rows,
                sum, see, step);
  const bool has_shared = block.groups.size() > 1 && !(by_itself && block.mixture->joined);
  const bool gated = block.plan.groups.front().linears.size() > 1;
  const float* const gate = gated ? activations.routed.as<float>() + block.plan.mixture.experts : nullptr;
  if (has_shared) run_shared(block, step.norm, observer);
  if (apart) return add_mixture(block, gate);
  if (!has_shared) return;
  if (by_itself) {
    pending.shared = activations.shared.as<float>();
    pending.gate = gate;
    return;
  }
  kernels::combine_cuda({.shared = activations.shared.as<float>(),
                         .gate = gate,
                         .gate_stride = router.n,
                         .rows = rows,
                         .cols = config.hidden_size,
                         .y = residual,
                         .overlap = step_overlaps()},
                        stream);
}

void LayerRunner::add_mixture(const CudaBlock& block, const float* gate) {
  activations.added.fill(0, stream);
  kernels::AddNormedArgs args{.x = activations.experts.as<float>(),
                              .weight = block.norm(model::NormRole::expert_output),
                              .eps = static_cast<float>(config.rms_norm_eps),
                              .rows = rows,
                              .cols = config.hidden_size,
                              .y = activations.added.as<float>(),
                              .overlap = step_overlaps()};
  kernels::add_normed_cuda(args, stream);
  if (block.groups.size() > 1 && gate == nullptr) {
    args.x = activations.shared.as<float>();
    args.weight = block.norm(model::NormRole::dense_output);
    kernels::add_normed_cuda(args, stream);
  } else if (block.groups.size() > 1) {
    ensure(block.norm(model::NormRole::dense_output) == nullptr, "a gate behind a norm of the shared expert");
    kernels::combine_cuda({.shared = activations.shared.as<float>(),
                           .gate = gate,
                           .gate_stride = block.groups.front().n,
                           .rows = rows,
                           .cols = config.hidden_size,
                           .y = activations.added.as<float>(),
                           .overlap = step_overlaps()},
                          stream);
  }
  add_apart(block);
}

void LayerRunner::run_block(const CudaBlock& block, const Attend& attend, const CudaObserver* observer,
                            const NormBetween& next) {
  if (block.mixture) return run_mixture(block, observer, next);
  using model::BlockKind;
  const CudaLinear &first = block.groups.front(), &last = block.groups.back();
  const bool attends = block.plan.kind == BlockKind::attention || block.plan.kind == BlockKind::delta_net;
  const DeviceBuffer& mixed = attends ? activations.attended : activations.gated;
  const auto* const normed = activations.normed.as<__half>();
  normalize(block.norm(model::NormRole::input));
  if (observe(first, activations.normed, observer)) return;
  if (block.plan.kind == BlockKind::gated_mlp) {
    multiply_gated(block.plan, first, normed, input_norm());
  } else {
    multiplier.multiply(first, normed, rows, activations.qkv.as<float>(), input_norm());
    if (attends) {
      attend(block);
    } else {
      embed_layer(block);
    }
  }
  if (observe(last, mixed, observer)) return;
  if (!adds_apart(block.plan)) return add_product(block, mixed, next);
  multiplier.multiply(last, mixed.as<__half>(), rows, activations.added.as<float>());
  add_apart(block);
}

void LayerRunner::run(const CudaLayer& layer, const Attend& attend, const CudaObserver* observer,
                      const NormBetween& behind) {
  for (size_t i = 0; i < layer.blocks.size(); ++i) {
    const NormBetween next = i + 1 < layer.blocks.size() ? layer.blocks[i + 1].taken_over() : behind;
    // An observer sees complete inputs.
    run_block(layer.blocks[i], attend, observer, observer != nullptr ? NormBetween{} : next);
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
                             .overlap = runner.step_overlaps()},
                            runner.stream);
  return activations.split.as<float>();
}

void apply_gates(LayerRunner& runner, const CudaBlock& block) {
  const model::AttentionConfig& attention = block.plan.attention;
  if (!attention.output_gate) return;
  kernels::sigmoid_multiply_cuda(runner.activations.attended.as<__half>(), runner.activations.gates.as<float>(),
                                 runner.rows * attention.heads * attention.head_dim, runner.step_overlaps(),
                                 runner.stream);
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
                           .scratch = activations.mixed.as<float>() + first * kernels::delta_scratch(shape),
                           .out = activations.attended.as<__half>() + first * shape.values(),
                           .overlap = runner.step_overlaps()},
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
