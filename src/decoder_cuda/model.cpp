#include "decoder_cuda/model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "decoder_cuda/dense.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;

/// The embedding table as a head: the same memory.
CudaLinear tied_head(const kernels::LinearWeight& weight, const DeviceBuffer& table, const device::Properties& gpu) {
  CudaLinear head;
  head.names = {weight.name};
  head.n = weight.n;
  head.k = weight.k;
  CudaProduct product;
  product.linear.passes = {dense_pass(table, weight.n, weight.k)};
  product.scheme = kernels::scheme_text(product.linear);
  product.offloaded.resize(1);
  plan_product(product, gpu);
  head.products.push_back(std::move(product));
  head.bytes = weight.n * weight.k * 2;
  return head;
}

CudaBlock upload_block(const model::Block& plan, const model::LayerWeights& weights, UploadRing& ring, bool offload) {
  CudaBlock block{.plan = plan, .norms = {}, .groups = {}};
  for (const auto& norm : plan.norms) block.norms.push_back(ring.copy_of(bytes_of(weights.norms[norm.position])));
  for (const auto& vector : plan.vectors) {
    std::vector<float> values = weights.vectors[vector.position];
    if (vector.role == model::VectorRole::router_scale) {
      // The weight of a norm, over the root of the width.
      for (float& value : values) value /= std::sqrt(static_cast<float>(values.size()));
    }
    block.vectors.push_back(ring.copy_of(bytes_of(values)));
  }
  if (plan.kind == model::BlockKind::mixture) block.mixture = upload_mixture(plan, weights, ring);
  const bool has_shared = block.mixture && block.mixture->joined;
  for (const auto& group : plan.groups) {
    if (group.expert || (has_shared && !block.groups.empty())) continue;
    std::vector<const kernels::LinearWeight*> linears;
    for (const auto& linear : group.linears) linears.push_back(&weights.linears[linear.position]);
    const bool gated = group.linears.front().role == model::Role::gate && linears.size() == 2;
    block.groups.push_back(gated ? upload_gated(*linears[0], *linears[1], ring, offload)
                                 : upload_linears(linears, ring, offload));
  }
  if (block.mixture) block.join_mixture();
  return block;
}

}  // namespace

const float* CudaBlock::norm(model::NormRole role) const noexcept {
  const auto found = std::ranges::find(plan.norms, role, &model::PlannedNorm::role);
  return found == plan.norms.end() ? nullptr : norms[static_cast<size_t>(found - plan.norms.begin())].as<float>();
}

NormBetween CudaBlock::taken_over() const noexcept {
  const bool chooses = mixture && chooses_by_product(plan);
  const NormBetween own{norm(model::NormRole::input), chooses ? &groups.front() : nullptr};
  if (!mixture) return fuses(groups.front()) ? own : NormBetween{};
  // Its router completes logits; what else reads the norm must complete products.
  const bool shared = groups.size() == 1 || (fuses(groups[1]) && groups[1].gates() != kernels::GateOrder::none);
  return !reads_several_norms(plan) && shared && mixture->routes() ? own : NormBetween{};
}

void CudaBlock::join_mixture() {
  mixture->router_bias = groups.front().products.front().linear.bias;
  std::ranges::move(mixture->shared, std::back_inserter(groups));
  mixture->shared.clear();
}

const float* CudaBlock::vector(model::VectorRole role) const noexcept {
  const auto found = std::ranges::find(plan.vectors, role, &model::PlannedVector::role);
  return found == plan.vectors.end() ? nullptr : vectors[static_cast<size_t>(found - plan.vectors.begin())].as<float>();
}

CudaLayer upload_layer(const model::LayerWeights& weights, UploadRing& ring, bool offload) {
  CudaLayer layer;
  for (const auto& block : weights.plan.blocks) {
    layer.blocks.push_back(upload_block(block, weights, ring, offload));
  }
  return layer;
}

CudaLayer upload_layer(const model::LayerWeights& weights, const device::Stream& stream, bool offload) {
  UploadRing ring(stream);
  CudaLayer layer = upload_layer(weights, ring, offload);
  ring.finish();
  return layer;
}

namespace {

/// Where the rows of a linear stand as f16, one below the other; null: they do not.
std::byte* dense_rows(CudaLayer& layer, const model::LayerWeights& weights, std::string_view name) {
  for (auto& block : layer.blocks) {
    for (auto& group : block.groups) {
      int64_t first = 0;
      for (const auto& own : group.names) {
        const auto& weight = *std::ranges::find(weights.linears, own, &kernels::LinearWeight::name);
        if (own == name) return group.dense_rows(first, weight.n);
        first += weight.n;
      }
    }
  }
  return nullptr;
}

}  // namespace

bool replace_dense(CudaLayer& layer, const model::LayerWeights& weights, std::span<const std::string> linears,
                   UploadRing& ring) {
  for (const auto& name : linears) {
    const auto& weight = *std::ranges::find(weights.linears, name, &kernels::LinearWeight::name);
    std::byte* const rows = is_dense(weight) ? dense_rows(layer, weights, name) : nullptr;
    if (rows == nullptr) return false;
    upload_dense(weight, rows, ring);
  }
  return true;
}

std::vector<const CudaLinear*> linears_of(std::span<const CudaLayer> layers) {
  std::vector<const CudaLinear*> all;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) {
      for (const auto& linear : block.groups) all.push_back(&linear);
      if (!block.mixture) continue;
      for (const auto* stack : {&block.mixture->all_inputs, &block.mixture->all_outputs}) {
        if (*stack) all.push_back(&**stack);
      }
      for (const auto* side : {&block.mixture->inputs, &block.mixture->outputs}) {
        for (const auto& linear : *side) all.push_back(&linear);
      }
    }
  }
  return all;
}

std::vector<const CudaMixture*> mixtures_of(std::span<const CudaLayer> layers) {
  std::vector<const CudaMixture*> all;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) {
      if (block.mixture) all.push_back(&*block.mixture);
    }
  }
  return all;
}

CudaModel CudaModel::upload(device::Context& gpu, const model::Model& model, std::optional<int64_t> residual_bytes) {
  require_gpu_decoder(model.config());
  const device::Stream stream(gpu);
  UploadRing ring(stream);
  CudaModel result(gpu);
  result.config_ = model.config();
  const bool offload = residual_bytes.has_value();
  result.begins_ = model.begins();
  result.ends_ = model.ends();
  for (const auto& weights : model.layers()) result.layers_.push_back(upload_layer(weights, ring, offload));
  result.upload_ends(model, ring, offload);
  if (const auto& own = model.layer_embeddings()) {
    const std::array one = {&own->projection};
    auto& uploaded = result.layer_embeddings_.emplace();
    uploaded.table = upload_rows(own->table, ring);
    uploaded.projection = upload_linears(std::span<const kernels::LinearWeight* const>(one), ring);
    uploaded.norm = ring.copy_of(bytes_of(own->norm));
  }
  ring.finish();
  if (offload) result.keep_resident(*residual_bytes, stream);
  return result;
}

/// What stands in front of the layers and behind them, where that is here.
void CudaModel::upload_ends(const model::Model& model, UploadRing& ring, bool offload) {
  const kernels::LinearWeight& head = model.head();
  const bool shares = ends_ && &head == &model.embeddings() && is_dense(head);
  if (begins_ || shares) embeddings_ = upload_rows(model.embeddings(), ring);
  if (!ends_) return;
  final_norm_ = ring.copy_of(bytes_of(model.final_norm()));
  const std::array one = {&head};
  head_ = shares ? tied_head(head, embeddings_, gpu_->properties())
                 : upload_linears(std::span<const kernels::LinearWeight* const>(one), ring, offload);
}

void CudaModel::keep_resident(int64_t bytes, const device::Stream& stream) {
  std::vector<CudaLinear*> linears;
  for (auto& layer : layers_) {
    for (auto& block : layer.blocks) {
      for (auto& linear : block.groups) linears.push_back(&linear);
    }
  }
  if (ends_) linears.push_back(&head_);
  decoder_cuda::keep_resident(linears, bytes, stream);
}

std::vector<const CudaLinear*> CudaModel::linears() const {
  auto all = linears_of(layers_);
  if (layer_embeddings_) all.push_back(&layer_embeddings_->projection);
  if (ends_) all.push_back(&head_);
  return all;
}

int64_t CudaModel::bytes_per_token() const {
  auto bytes = static_cast<int64_t>(final_norm_.size());
  for (const auto* linear : linears()) bytes += linear->bytes;
  for (const auto& layer : layers_) {
    for (const auto& block : layer.blocks) {
      for (const auto& norm : block.norms) bytes += static_cast<int64_t>(norm.size());
    }
  }
  return bytes;
}

std::vector<std::string> CudaModel::widened() const {
  std::vector<std::string> names;
  for (const auto* linear : linears()) names.insert(names.end(), linear->widened.begin(), linear->widened.end());
  return names;
}

}  // namespace w4q::decoder_cuda
