// A model's weights in GPU memory, in the shape in which the CUDA decoder reads them: linears that read the same input
// are one product.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder_cuda/linear.h"
#include "decoder_cuda/mixture.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "model/model.h"

namespace w4q::decoder_cuda {

/// The norm between two products that the kernels of both sides can take over in a step; null: none that they can.
struct NormBetween {
  const float* weight = nullptr;
  const CudaLinear* router = nullptr;  ///< of the mixture behind it, if that can take its products in parts
};

struct CudaBlock {
  model::Block plan;
  std::vector<device::DeviceBuffer> norms;         ///< fp32, as plan.norms
  std::vector<CudaLinear> groups;                  ///< as plan.groups; of a mixture the router and what is shared
  std::vector<device::DeviceBuffer> vectors = {};  ///< fp32, as plan.vectors
  std::optional<CudaMixture> mixture = {};

  const float* norm(model::NormRole role) const noexcept;  ///< null where the block has none
  const float* vector(model::VectorRole role) const noexcept;
  /// The mixture takes the router's bias, and gives the block what it has of the shared part.
  void join_mixture();
  /// The block's norm, where whatever reads it can complete it.
  NormBetween taken_over() const noexcept;
};

struct CudaLayer {
  std::vector<CudaBlock> blocks;
};

/// Throws unsupported, with the block and what it does, where the GPU's decoder cannot run a model.
void require_gpu_decoder(const model::ModelConfig& config);

/// Brings one layer to the stream's GPU. Throws as upload_linears.
CudaLayer upload_layer(const model::LayerWeights& weights, UploadRing& ring, bool offload = false);
CudaLayer upload_layer(const model::LayerWeights& weights, const device::Stream& stream, bool offload = false);

/// The rows of these linears anew, where they stand as f16 and so do the new ones; false where one does not.
bool replace_dense(CudaLayer& layer, const model::LayerWeights& weights, std::span<const std::string> linears,
                   UploadRing& ring);

/// The mixtures of layers.
std::vector<const CudaMixture*> mixtures_of(std::span<const CudaLayer> layers);
/// The linears of layers in the order of a step, a group each, experts by themselves behind those of all.
std::vector<const CudaLinear*> linears_of(std::span<const CudaLayer> layers);

/// As model::LayerEmbeddings.
struct CudaLayerEmbeddings {
  device::DeviceBuffer table;  ///< f16 [vocab × layers · layer_embedding_size]
  CudaLinear projection;
  device::DeviceBuffer norm;
};

class CudaModel {
 public:
  /// Brings a model to a GPU: packed weights in the layout of their kernel, others as f16 (upload_linears).
  /// Throws device when there is no room, unsupported for weights beyond f16.
  /// With `residual_bytes`, residual passes of rotated linears take up to so many bytes of GPU memory; the others
  /// stay in host memory and are moved for each product.
  static CudaModel upload(device::Context& gpu, const model::Model& model, std::optional<int64_t> residual_bytes = {});
  /// Random weights made on the GPU, for measurements: linears and the head in passes of these schemes (one of kbit or
  /// integer, or rotated ones), f16 where there are none. `residual_bytes` as upload.
  static CudaModel random(device::Context& gpu, const model::ModelConfig& config,
                          std::span<const formats::Scheme> passes, std::optional<int64_t> residual_bytes = {});

  /// The GPU that it is on, which outlives it.
  device::Context& context() const noexcept { return *gpu_; }
  const model::ModelConfig& config() const noexcept { return config_; }
  const std::vector<CudaLayer>& layers() const noexcept { return layers_; }
  const float* final_norm() const noexcept { return final_norm_.as<float>(); }
  /// Whether the first layer of the model is here, and the last: embeddings, norm and head go with them.
  bool begins() const noexcept { return begins_; }
  bool ends() const noexcept { return ends_; }
  /// The embedding table, f16 [vocab × hidden].
  const __half* embeddings() const noexcept { return embeddings_.as<__half>(); }
  const CudaLinear& head() const noexcept { return head_; }
  const std::optional<CudaLayerEmbeddings>& layer_embeddings() const noexcept { return layer_embeddings_; }

  /// Every linear, the head last where it is here.
  std::vector<const CudaLinear*> linears() const;
  /// Bytes of weights that one decoded token reads: linears and norms.
  int64_t bytes_per_token() const;
  /// Packed layers that no kernel reads, which were decoded to f16.
  std::vector<std::string> widened() const;

 private:
  explicit CudaModel(device::Context& gpu) : gpu_(&gpu) {}
  void upload_ends(const model::Model& model, UploadRing& ring, bool offload);
  void keep_resident(int64_t bytes, const device::Stream& stream);

  device::Context* gpu_;
  model::ModelConfig config_;
  bool begins_ = true, ends_ = true;
  std::vector<CudaLayer> layers_;
  device::DeviceBuffer final_norm_, embeddings_;
  CudaLinear head_;
  std::optional<CudaLayerEmbeddings> layer_embeddings_;
};

}  // namespace w4q::decoder_cuda
