#include "decoder_cuda/mixture.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using kernels::GateColumns;

GateColumns columns_of(const model::Block& plan) {
  return plan.storage == model::ExpertStorage::stacked_in_turn ? GateColumns::in_turn : GateColumns::halves;
}

/// Whether weights of n outputs each can be told apart in a stack.
bool is_stack(const CudaLinear& all, int64_t n) {
  if (all.products.size() != 1) return false;
  const kernels::DeviceLinear& linear = all.products.front().linear;
  if (linear.passes.size() != 1 || linear.input_scale != nullptr) return false;
  const kernels::DevicePass& pass = linear.passes.front();
  return pass.layout == kernels::f16_rows || (pass.layout == "kbit-fragment" && n % 64 == 0);
}

/// Each of many weights as a linear by itself, in the same memory.
std::vector<CudaLinear> views_of(const CudaLinear& all, int64_t n, const device::Properties& gpu) {
  std::vector<CudaLinear> views;
  const int64_t count = all.n / n, names = std::ssize(all.names) / count;
  for (int64_t index = 0; index < count; ++index) {
    CudaLinear& view = views.emplace_back();
    const auto first = all.names.begin() + index * names;
    view.names.assign(first, first + names);
    view.n = n, view.k = all.k;
    CudaProduct product;
    product.linear = kernels::one_of(all.products.front().linear, index, n);
    product.scheme = all.products.front().scheme;
    product.offloaded.resize(1);
    if (index == 0) {
      plan_product(product, gpu);
    } else {
      product.plan = views.front().products.front().plan;
      product.int8_plan = views.front().products.front().int8_plan;
    }
    view.products.push_back(std::move(product));
  }
  return views;
}

/// What a token reads of all experts.
void count_bytes(CudaLinear& all, const model::MixtureConfig& mixture) {
  all.bytes = all.bytes * mixture.chosen / mixture.experts;
}

std::vector<const kernels::LinearWeight*> weights_of(const model::LayerWeights& weights,
                                                     const model::InputGroup& group) {
  std::vector<const kernels::LinearWeight*> linears;
  for (const auto& linear : group.linears) linears.push_back(&weights.linears[linear.position]);
  return linears;
}

struct Uploaded {
  std::optional<CudaLinear> all;
  std::vector<CudaLinear> each;
};

/// Groups first, first + 2, … of the experts.
Uploaded upload_side(const model::Block& plan, const model::LayerWeights& weights, size_t first, UploadRing& ring) {
  std::vector<const kernels::LinearWeight*> all;
  const auto experts = static_cast<size_t>(plan.mixture.experts);
  for (size_t expert = 0; expert < experts; ++expert) {
    for (const auto* weight : weights_of(weights, plan.groups[first + 2 * expert])) all.push_back(weight);
  }
  const size_t each = all.size() / experts;
  int64_t n = 0;
  for (size_t i = 0; i < each; ++i) n += all[i]->n;
  const auto& gpu = ring.stream().context().properties();
  Uploaded result;
  const bool whole = std::ranges::all_of(all, [](const auto* weight) { return weight->n % 64 == 0; });
  if (whole) {
    CudaLinear stack = upload_linears(all, ring);
    if (is_stack(stack, n)) {
      result.each = views_of(stack, n, gpu);
      count_bytes(stack, plan.mixture);
      result.all = std::move(stack);
      return result;
    }
  }
  for (size_t expert = 0; expert < experts; ++expert) {
    result.each.push_back(upload_linears(std::span(all).subspan(expert * each, each), ring));
    count_bytes(result.each.back(), plan.mixture);
  }
  return result;
}

bool side_routes(const std::optional<CudaLinear>& all, int64_t n) {
  return all && kernels::routes(all->products.front().linear, all->products.front().plan, n);
}

}  // namespace

bool CudaMixture::routes() const noexcept {
  return side_routes(all_inputs, inputs.front().n) && side_routes(all_outputs, outputs.front().n);
}

CudaMixture upload_mixture(const model::Block& plan, const model::LayerWeights& weights, UploadRing& ring) {
  CudaMixture mixture;
  auto inputs = upload_side(plan, weights, 1, ring), outputs = upload_side(plan, weights, 2, ring);
  mixture.inputs = std::move(inputs.each), mixture.all_inputs = std::move(inputs.all);
  mixture.outputs = std::move(outputs.each), mixture.all_outputs = std::move(outputs.all);
  mixture.columns = columns_of(plan);
  const auto vector = [&](model::VectorRole role) -> const float* {
    const auto* planned = plan.vector(role);
    if (planned == nullptr) return nullptr;
    mixture.memory.push_back(ring.copy_of(bytes_of(weights.vectors[planned->position])));
    return mixture.memory.back().as<float>();
  };
  mixture.correction = vector(model::VectorRole::correction);
  mixture.expert_scale = vector(model::VectorRole::expert_scale);
  return mixture;
}

CudaMixture mixture_of(const model::Block& plan, CudaLinear all_inputs, CudaLinear all_outputs,
                       const device::Properties& gpu) {
  const int64_t experts = plan.mixture.experts, n_in = all_inputs.n / experts, n_out = all_outputs.n / experts;
  ensure(is_stack(all_inputs, n_in) && is_stack(all_outputs, n_out), "mixture_of: experts that cannot be told apart");
  CudaMixture mixture;
  mixture.columns = columns_of(plan);
  mixture.inputs = views_of(all_inputs, n_in, gpu), mixture.outputs = views_of(all_outputs, n_out, gpu);
  count_bytes(all_inputs, plan.mixture), count_bytes(all_outputs, plan.mixture);
  mixture.all_inputs = std::move(all_inputs), mixture.all_outputs = std::move(all_outputs);
  return mixture;
}

MixtureScratch::MixtureScratch(const model::ModelConfig& config, std::span<const CudaMixture* const> mixtures,
                               int64_t rows, CudaMultiplier& multiplier, const device::Stream& stream)
    : stream_(stream), multiplier_(multiplier), hidden_(config.hidden_size), places_(config.mixture.chosen) {
  const device::Context& gpu = stream.context();
  int64_t inner = 0;
  for (const auto* mixture : mixtures) inner = std::max(inner, mixture->inner());
  const auto floats = [&](int64_t count) { return DeviceBuffer(gpu, static_cast<size_t>(count) * sizeof(float)); };
  const auto halves = [&](int64_t count) { return DeviceBuffer(gpu, static_cast<size_t>(count) * sizeof(__half)); };
  const int64_t listed = rows * places_, widest = std::max(rows, places_);
  places_on_gpu_ = floats(listed), shares_ = floats(listed), lists_ = floats(listed), listed_shares_ = floats(listed);
  gathered_ = halves(rows * hidden_);
  both_ = floats(widest * 2 * inner);
  gated_ = halves(widest * inner);
  products_ = floats(widest * hidden_);
  for (auto* staged : {&staged_places_, &staged_shares_, &staged_lists_, &staged_listed_}) {
    *staged = device::PinnedBuffer(gpu, static_cast<size_t>(listed) * sizeof(float));
  }
}

void MixtureScratch::run(const model::MixtureConfig& config, const kernels::Gating& gating, const CudaMixture& mixture,
                         const float* logits, int64_t stride, const __half* x, int64_t rows, float* residual,
                         const Observe& observe, kernels::PendingSum* later) {
  kernels::route_cuda({.logits = logits,
                       .rows = rows,
                       .stride = stride,
                       .experts = static_cast<int>(config.experts),
                       .chosen = static_cast<int>(config.chosen),
                       .sigmoid = config.scoring == model::Scoring::sigmoid,
                       .renormalizes = config.renormalizes,
                       .scale = static_cast<float>(config.scale),
                       .groups = static_cast<int>(config.groups),
                       .chosen_groups = static_cast<int>(config.chosen_groups),
                       .correction = mixture.correction,
                       .expert_scale = mixture.expert_scale,
                       .places = places_on_gpu_.as<int32_t>(),
                       .shares = shares_.as<float>(),
                       .overlap = multiplier_.overlap() && rows == 1},
                      stream_);
  if (rows == 1 && !observe && mixture.routes()) return run_one(gating, mixture, x, residual, later);
  run_by_host(config, gating, mixture, x, rows, residual, observe);
}

void MixtureScratch::run_one(const kernels::Gating& gating, const CudaMixture& mixture, const __half* x,
                             float* residual, kernels::PendingSum* later) {
  const int64_t inner = mixture.inner();
  const auto places = static_cast<int>(places_);
  const bool overlap = multiplier_.overlap();
  kernels::RoutedCall call{.x = x,
                           .experts = places_on_gpu_.as<int32_t>(),
                           .places = places,
                           .n = mixture.inputs.front().n,
                           .y = both_.data(),
                           .weights_ready = overlap};
  multiplier_.multiply_routed(*mixture.all_inputs, call);
  kernels::gate_multiply_cuda(gating, both_.as<float>(), places, inner, mixture.columns, gated_.as<__half>(), overlap,
                              stream_);
  call.x = gated_.as<__half>();
  call.x_stride = inner;
  call.n = mixture.outputs.front().n;
  call.y = products_.data();
  multiplier_.multiply_routed(*mixture.all_outputs, call);
  if (later != nullptr) {
    *later = {.parts = products_.as<float>(), .shares = shares_.as<float>(), .places = places};
    return;
  }
  kernels::combine_cuda({.x = products_.as<float>(),
                         .shares = shares_.as<float>(),
                         .places = places,
                         .rows = 1,
                         .cols = hidden_,
                         .y = residual,
                         .overlap = overlap},
                        stream_);
}

void MixtureScratch::run_by_host(const model::MixtureConfig& config, const kernels::Gating& gating,
                                 const CudaMixture& mixture, const __half* x, int64_t rows, float* residual,
                                 const Observe& observe) {
  const auto count = static_cast<size_t>(rows * places_), bytes = count * sizeof(int32_t);
  places_on_gpu_.download(staged_places_.bytes().first(bytes), stream_);
  shares_.download(staged_shares_.bytes().first(bytes), stream_);
  stream_.synchronize();
  const auto* const places = reinterpret_cast<const int32_t*>(staged_places_.bytes().data());
  const auto* const shares = reinterpret_cast<const float*>(staged_shares_.bytes().data());
  auto* const lists = reinterpret_cast<int32_t*>(staged_lists_.bytes().data());
  auto* const listed = reinterpret_cast<float*>(staged_listed_.bytes().data());
  std::vector<size_t> begins(static_cast<size_t>(config.experts) + 1);
  for (size_t i = 0; i < count; ++i) ++begins[static_cast<size_t>(places[i]) + 1];
  for (size_t expert = 1; expert < begins.size(); ++expert) begins[expert] += begins[expert - 1];
  auto next = begins;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = next[static_cast<size_t>(places[i])]++;
    lists[at] = static_cast<int32_t>(static_cast<int64_t>(i) / places_);
    listed[at] = shares[i];
  }
  lists_.upload(staged_lists_.bytes().first(bytes), stream_);
  listed_shares_.upload(staged_listed_.bytes().first(bytes), stream_);
  const int64_t inner = mixture.inner();
  for (size_t expert = 0; expert + 1 < begins.size(); ++expert) {
    const auto mine = static_cast<int64_t>(begins[expert + 1] - begins[expert]);
    if (mine == 0) continue;
    const int32_t* const list = lists_.as<int32_t>() + begins[expert];
    kernels::gather_rows_cuda(x, list, mine, hidden_, gathered_.as<__half>(), stream_);
    if (observe) observe(mixture.inputs[expert], gathered_, mine);
    multiplier_.multiply(mixture.inputs[expert], gathered_.as<__half>(), mine, both_.as<float>());
    kernels::gate_multiply_cuda(gating, both_.as<float>(), mine, inner, mixture.columns, gated_.as<__half>(), false,
                                stream_);
    if (observe) observe(mixture.outputs[expert], gated_, mine);
    multiplier_.multiply(mixture.outputs[expert], gated_.as<__half>(), mine, products_.as<float>());
    kernels::scatter_rows_cuda(products_.as<float>(), list, listed_shares_.as<float>() + begins[expert], mine, hidden_,
                               residual, stream_);
  }
  stream_.synchronize();  // the staged lists are the next block's
}

}  // namespace w4q::decoder_cuda
