#include "decoder_cuda/model.h"

#include <array>

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;

DeviceBuffer upload_vector(const std::vector<float>& values, const device::Stream& stream) {
  DeviceBuffer buffer = DeviceBuffer::copy_of(bytes_of(values), stream);
  stream.synchronize();
  return buffer;
}

bool is_dense(const kernels::LinearWeight& weight) {
  return std::holds_alternative<kernels::LinearWeight::Dense>(weight.matrix);
}

/// The embedding table as a head: the same memory.
CudaLinear tied_head(const kernels::LinearWeight& weight, const DeviceBuffer& table) {
  CudaLinear head;
  head.names = {weight.name};
  head.n = weight.n;
  head.k = weight.k;
  CudaProduct product;
  product.n = weight.n;
  product.dense = table.as<__half>();
  head.products.push_back(product);
  head.bytes = weight.n * weight.k * 2;
  return head;
}

}  // namespace

CudaLayer upload_layer(const model::LayerWeights& weights, const device::Stream& stream, bool offload) {
  using Layers = std::span<const kernels::LinearWeight* const>;
  const std::array qkv = {&weights.q, &weights.k, &weights.v};
  const std::array o = {&weights.o}, down = {&weights.down};
  CudaLayer layer;
  layer.input_norm = upload_vector(weights.input_norm, stream);
  layer.post_attention_norm = upload_vector(weights.post_attention_norm, stream);
  layer.q_norm = upload_vector(weights.q_norm, stream);
  layer.k_norm = upload_vector(weights.k_norm, stream);
  layer.qkv = upload_linears(Layers(qkv), stream, offload);
  layer.o = upload_linears(Layers(o), stream, offload);
  layer.gate_up = upload_gated(weights.gate, weights.up, stream, offload);
  layer.down = upload_linears(Layers(down), stream, offload);
  return layer;
}

CudaModel CudaModel::upload(device::Context& gpu, const model::Model& model, std::optional<int64_t> residual_bytes) {
  const device::Stream stream(gpu);
  CudaModel result(gpu);
  result.config_ = model.config();
  const bool offload = residual_bytes.has_value();
  for (const auto& weights : model.layers()) result.layers_.push_back(upload_layer(weights, stream, offload));
  result.final_norm_ = upload_vector(model.final_norm(), stream);
  result.embeddings_ = upload_rows(model.embeddings(), stream);
  const kernels::LinearWeight& head = model.head();
  if (&head == &model.embeddings() && is_dense(head)) {
    result.head_ = tied_head(head, result.embeddings_);
  } else {
    const std::array one = {&head};
    result.head_ = upload_linears(std::span<const kernels::LinearWeight* const>(one), stream, offload);
  }
  if (offload) result.keep_resident(*residual_bytes, stream);
  return result;
}

void CudaModel::keep_resident(int64_t bytes, const device::Stream& stream) {
  std::vector<CudaLinear*> linears;
  for (auto& layer : layers_) {
    for (auto* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) linears.push_back(linear);
  }
  linears.push_back(&head_);
  decoder_cuda::keep_resident(linears, bytes, stream);
}

std::vector<const CudaLinear*> CudaModel::linears() const {
  std::vector<const CudaLinear*> all;
  for (const auto& layer : layers_) {
    for (const auto* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) all.push_back(linear);
  }
  all.push_back(&head_);
  return all;
}

int64_t CudaModel::bytes_per_token() const noexcept {
  int64_t bytes = head_.bytes + static_cast<int64_t>(final_norm_.size());
  for (const auto& layer : layers_) {
    bytes += layer.qkv.bytes + layer.o.bytes + layer.gate_up.bytes + layer.down.bytes;
    bytes += static_cast<int64_t>(layer.input_norm.size() + layer.post_attention_norm.size());
  }
  return bytes;
}

std::vector<std::string> CudaModel::widened() const {
  std::vector<std::string> names;
  for (const auto* linear : linears()) names.insert(names.end(), linear->widened.begin(), linear->widened.end());
  return names;
}

}  // namespace w4q::decoder_cuda
