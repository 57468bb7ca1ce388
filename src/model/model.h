// A model ready to run: config and weights, 16-bit tensors as views into the file, packed linears as packed planes. A
// packed model never exists in full precision.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/linear/linear.h"
#include "model/layer_plan.h"
#include "model/layer_stage.h"
#include "model/opened.h"
#include "model/parameters.h"

namespace w4q::model {

/// True for a tensor that old checkpoints hold and no decoder reads: rotary_emb.inv_freq, which config.json implies.
bool is_derived_tensor(std::string_view name) noexcept;

/// Throws mismatch unless the tensor has this shape, unsupported unless it is a weight of 16 or 32 bits, naming it.
void check_weight(const io::Checkpoint& checkpoint, const std::string& name, const Shape& shape);

/// One layer, by the positions in its plan.
struct LayerWeights {
  LayerPlan plan;
  std::vector<std::vector<float>> norms;  ///< what x̂ is multiplied by: with the offset
  std::vector<kernels::LinearWeight> linears;
  std::vector<std::vector<float>> vectors;

  const kernels::LinearWeight& linear(Role role) const;  ///< the first one
};

/// The table of embeddings that layers have of their own, and what the residual stream adds to them.
struct LayerEmbeddings {
  kernels::LinearWeight table, projection;
  std::vector<float> norm;
};

/// Parts of a model by themselves, for work that never holds all of it. Errors as Model::open.
LayerWeights load_layer(const OpenedModel& model, int64_t index);
kernels::LinearWeight load_embeddings(const OpenedModel& model);
/// What Model::final_norm and Model::head hold.
std::vector<float> load_final_norm(const OpenedModel& model);
kernels::LinearWeight load_head(const OpenedModel& model);
/// Nothing where layers have none of their own.
std::optional<LayerEmbeddings> load_layer_embeddings(const OpenedModel& model);

/// What packed linears are held as. `stored`: those of w4q in another layout than the canonical one as they stand in the
/// file, mapped and not yet looked at: for decoder_cuda, which checks what it takes. Nobody else reads them.
enum class Planes { canonical, stored };
/// What a decoder on `gpu` wants, or with null the CPU's. With int8 activations integers are packed anew on the GPU: not
/// every layout has such a product.
constexpr Planes planes_for(const void* gpu, bool int8_activations = false) {
  return gpu != nullptr && !int8_activations ? Planes::stored : Planes::canonical;
}

class Model {
 public:
  /// Opens a Hugging Face folder, 16-bit or packed by w4q in any layout. Throws as config, checkpoint and formats do; a
  /// missing or misshapen parameter is named. Residual passes are left out unless `residual`.
  static Model open(const std::filesystem::path& folder, bool residual = true, Planes planes = Planes::canonical);
  /// Loads what is open; of several processes that hold a model together what this one needs: its layers, embeddings
  /// in front of the first one, norm and head behind the last. Throws as split_layers.
  static Model of(OpenedModel opened, Planes planes = Planes::canonical, const LayerStage& stage = {});

  /// A head that config.json does not mention and that is not stored has been marked as tied. Of the layers that are here.
  const ModelConfig& config() const noexcept { return config_; }
  /// Whether the first layer of the model is here, and the last.
  bool begins() const noexcept { return begins_; }
  bool ends() const noexcept { return ends_; }
  const checkpoint::Folder& folder() const noexcept { return opened_.folder; }

  const std::vector<LayerWeights>& layers() const noexcept { return layers_; }
  const std::vector<float>& final_norm() const noexcept { return final_norm_; }
  /// The embedding table as a [vocab × hidden] linear: rows are decoded one at a time.
  const kernels::LinearWeight& embeddings() const noexcept { return embeddings_; }
  /// Nothing where layers have no embeddings of their own.
  const std::optional<LayerEmbeddings>& layer_embeddings() const noexcept { return layer_embeddings_; }
  /// The head; the embeddings where they are tied.
  const kernels::LinearWeight& head() const noexcept { return head_ ? *head_ : embeddings_; }

 private:
  explicit Model(OpenedModel opened) : opened_(std::move(opened)) {}

  OpenedModel opened_;
  ModelConfig config_;
  bool begins_ = true, ends_ = true;
  std::vector<LayerWeights> layers_;
  std::vector<float> final_norm_;
  kernels::LinearWeight embeddings_;
  std::optional<LayerEmbeddings> layer_embeddings_;
  std::optional<kernels::LinearWeight> head_;
};

}  // namespace w4q::model
