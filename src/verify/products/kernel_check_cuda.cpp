#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>

#include "core/progress.h"
#include "decoder_cuda/model.h"
#include "model/int8_activations.h"
#include "verify/products/kernel_check.h"
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

void add(std::vector<KernelError> lines, KernelReport& report) {
  for (auto& line : lines) report.layers.push_back(std::move(line));
}

bool takes_int8(const CheckedProduct& product) {
  return std::ranges::all_of(product.weights, [](const auto* one) { return kernels::takes_int8_activations(*one); });
}

void check_layer(device::Context& gpu, const model::LayerWeights& weights, float eps, bool int8_activations,
                 KernelReport& report) {
  const device::Stream stream(gpu);
  const auto layer = decoder_cuda::upload_layer(weights, stream);
  const auto parts = parts_of(layer, weights);
  for (size_t i = 0; i < parts.size(); ++i) {
    const CheckedProduct& product = parts[i].product;
    add(check_product(gpu, product, false), report);
    if (int8_activations && takes_int8(product)) add(check_product(gpu, product, true), report);
    // A step's launches; behind the last product the layer stands in for the next one.
    const Part& next = parts[(i + 1) % parts.size()];
    if (product.use == Use::residual) add(check_step(gpu, product, next.product, next.norm, eps), report);
  }
}

}  // namespace

KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations) {
  if (int8_activations) model::check_int8_activations(model);
  Progress progress("kernels", static_cast<int64_t>(model.layers().size()) + 1, "layers");
  KernelReport report;
  const auto eps = static_cast<float>(model.config().rms_norm_eps);
  for (const auto& layer : model.layers()) {
    check_layer(gpu, layer, eps, int8_activations, report);
    progress.advance(1);
  }
  const device::Stream stream(gpu);
  const auto* head = &model.head();
  const auto on_gpu = decoder_cuda::upload_linears(std::array{head}, stream);
  add(check_product(gpu, {on_gpu, {head}, Use::plain}, false), report);
  progress.advance(1);
  return report;
}

}  // namespace w4q::verify
