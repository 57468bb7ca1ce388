#include <array>
#include <map>
#include <string>

#include "core/progress.h"
#include "decoder_cuda/model.h"
#include "model/int8_activations.h"
#include "verify/kernel_check.h"
#include "verify/product_check_cuda.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

/// Every weight of a model by its name.
using Weights = std::map<std::string, const LinearWeight*, std::less<>>;

Weights weights_of(const model::LayerWeights& layer) {
  Weights weights;
  for (const auto* weight : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
    weights[weight->name] = weight;
  }
  return weights;
}

CheckedProduct checked(const decoder_cuda::CudaLinear& linear, const Weights& weights, Use use) {
  CheckedProduct product{linear, {}, use};
  for (const auto& name : linear.names) product.weights.push_back(weights.at(name));
  return product;
}

void add(std::vector<KernelError> lines, KernelReport& report) {
  for (auto& line : lines) report.layers.push_back(std::move(line));
}

bool takes_int8(const CheckedProduct& product) {
  return std::ranges::all_of(product.weights, [](const auto* one) { return kernels::takes_int8_activations(*one); });
}

void check_layer(const model::LayerWeights& weights, float eps, bool int8_activations, KernelReport& report) {
  const device::Stream stream;
  const auto layer = decoder_cuda::upload_layer(weights, stream);
  const Weights by_name = weights_of(weights);
  const auto qkv = checked(layer.qkv, by_name, Use::plain), o = checked(layer.o, by_name, Use::residual);
  const auto gate_up = checked(layer.gate_up, by_name, Use::gated), down = checked(layer.down, by_name, Use::residual);
  for (const auto* product : {&qkv, &o, &gate_up, &down}) {
    add(check_product(*product, false), report);
    if (int8_activations && takes_int8(*product)) add(check_product(*product, true), report);
  }
  // A step's launches; the layer stands in for the one behind it.
  add(check_step(o, gate_up, weights.post_attention_norm, eps), report);
  add(check_step(down, qkv, weights.input_norm, eps), report);
}

}  // namespace

KernelReport check_kernels(const model::Model& model, bool int8_activations) {
  if (int8_activations) model::check_int8_activations(model);
  Progress progress("kernels", static_cast<int64_t>(model.layers().size()) + 1, "layers");
  KernelReport report;
  const auto eps = static_cast<float>(model.config().rms_norm_eps);
  for (const auto& layer : model.layers()) {
    check_layer(layer, eps, int8_activations, report);
    progress.advance(1);
  }
  const device::Stream stream;
  const auto* head = &model.head();
  const auto on_gpu = decoder_cuda::upload_linears(std::array{head}, stream);
  add(check_product({on_gpu, {head}, Use::plain}, false), report);
  progress.advance(1);
  return report;
}

}  // namespace w4q::verify
