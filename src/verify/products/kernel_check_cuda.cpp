#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>

#include "core/progress.h"
#include "decoder_cuda/model.h"
#include "model/int8_activations.h"
#include "verify/products/kernel_check.h"
#include "verify/products/kernel_share.h"
#include "verify/products/product_check_cuda.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

/// Every weight of a model by its name.
using Weights = std::map<std::string, const LinearWeight*, std::less<>>;

CheckedProduct checked(const decoder_cuda::CudaLinear& linear, const Weights& weights, Use use) {
  CheckedProduct product{linear, {}, use};
  for (const auto& name : linear.names) product.weights.push_back(weights.at(name));
  return product;
}

/// The products of a layer in the order in which they run, each with the norm before it, or none.
struct Part {
  CheckedProduct product;
  std::span<const float> norm;
};
std::vector<Part> parts_of(const decoder_cuda::CudaLayer& layer, const model::LayerWeights& weights) {
  Weights by_name;
  for (const auto& weight : weights.linears) by_name[weight.name] = &weight;
  std::vector<Part> parts;
  for (const auto& block : layer.blocks) {
    size_t mine = 0;
    for (const auto& group : block.plan.groups) {
      if (group.expert) continue;
      const bool adds = group.linears.front().outputs == model::Basis::stream;
      const bool gated = group.linears.front().role == model::Role::gate && group.linears.size() == 2;
      const Use use = adds && !block.mixture ? Use::residual : gated ? Use::gated : Use::plain;
      parts.push_back({checked(block.groups[mine++], by_name, use), {}});
      if (group.norm) parts.back().norm = weights.norms[group.norm->position];
    }
    if (!block.mixture) continue;
    for (const auto* side : {&block.mixture->inputs, &block.mixture->outputs}) {
      for (const auto& linear : *side) parts.push_back({checked(linear, by_name, Use::plain), {}});
    }
  }
  return parts;
}

void add(std::vector<KernelError> lines, std::vector<KernelError>& found) {
  for (auto& line : lines) found.push_back(std::move(line));
}

bool takes_int8(const CheckedProduct& product) {
  return std::ranges::all_of(product.weights, [](const auto* one) { return kernels::takes_int8_activations(*one); });
}

std::vector<KernelError> check_layer(device::Context& gpu, const model::LayerWeights& weights, float eps,
                                     bool int8_activations) {
  std::vector<KernelError> found;
  const device::Stream stream(gpu);
  const auto layer = decoder_cuda::upload_layer(weights, stream);
  const auto parts = parts_of(layer, weights);
  for (size_t i = 0; i < parts.size(); ++i) {
    const CheckedProduct& product = parts[i].product;
    add(check_product(gpu, product, false), found);
    if (int8_activations && takes_int8(product)) add(check_product(gpu, product, true), found);
    // A step's launches; behind the last product the layer stands in for the next one.
    const Part& next = parts[(i + 1) % parts.size()];
    if (product.use == Use::residual) add(check_step(gpu, product, next.product, next.norm, eps), found);
  }
  return found;
}

std::vector<KernelError> check_head(device::Context& gpu, const LinearWeight& head) {
  const device::Stream stream(gpu);
  const auto on_gpu = decoder_cuda::upload_linears(std::array{&head}, stream);
  return check_product(gpu, {on_gpu, {&head}, Use::plain}, false);
}

/// Of all parts of a model together.
void require_int8_activations(const model::Model& model, ranks::Ranks& ranks) {
  const auto found = ranks.together([&] { return std::string(model::any_int8_activations(model) ? "any" : ""); });
  if (std::ranges::all_of(found, &std::string::empty)) model::refuse_without_int8_activations();
}

}  // namespace

KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations, ranks::Ranks& ranks,
                           const model::LayerStage& stage) {
  if (int8_activations) require_int8_activations(model, ranks);
  const auto layers = static_cast<int64_t>(model.layers().size());
  const int64_t items = layers + (model.ends() ? 1 : 0), groups = stage.groups();
  Progress progress("kernels", (items - stage.group() + groups - 1) / groups, "layers");
  const auto eps = static_cast<float>(model.config().rms_norm_eps);
  return check_together(ranks, stage, items, [&](int64_t item) {
    auto found = item < layers ? check_layer(gpu, model.layers()[static_cast<size_t>(item)], eps, int8_activations)
                               : check_head(gpu, model.head());
    progress.advance(1);
    return found;
  });
}

KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations) {
  ranks::Ranks alone;
  return check_kernels(gpu, model, int8_activations, alone, {});
}

}  // namespace w4q::verify
