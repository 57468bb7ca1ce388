#include "model/model.h"

#include <algorithm>
#include <utility>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::model {
namespace {

/// Loads parameters from a checkpoint and checks each against what the architecture expects.
class Loader {
 public:
  explicit Loader(const OpenedModel& model, Planes planes = Planes::canonical)
      : folder_(model.folder), config_(model.config), planes_(planes) {}

  /// A 16-bit or fp32 tensor of exactly this shape.
  std::shared_ptr<const io::LoadedTensor> tensor(const std::string& name, const Shape& shape) const {
    check_weight(folder_.tensors, name, shape);
    return std::make_shared<const io::LoadedTensor>(folder_.tensors.load(name));
  }

  std::vector<float> vector(const std::string& name, int64_t size) const {
    const auto loaded = tensor(name, {size});
    std::vector<float> values(static_cast<size_t>(size));
    widen(loaded->view().bytes, loaded->view().dtype, values);
    return values;
  }

  std::vector<float> norm(const PlannedNorm& norm) const {
    auto values = vector(norm.name + ".weight", norm.size);
    if (norm.offset != 0) std::ranges::for_each(values, [&](float& value) { value += norm.offset; });
    return values;
  }

  kernels::LinearWeight linear(const PlannedLinear& plan) const {
    kernels::LinearWeight weight{.name = plan.name, .n = plan.n, .k = plan.k, .matrix = {}, .bias = {}};
    if (const checkpoint::PackedLinearInfo* packed = folder_.quantization.find(plan.name)) {
      if (packed->n != plan.n || packed->k != plan.k) {
        throw Error(ErrorCode::mismatch, concat(plan.name, ": packed as ", shape_text({packed->n, packed->k})))
            .detail(concat("expected ", shape_text({plan.n, plan.k}), " from the sizes in config.json"));
      }
      weight.matrix = std::make_shared<const formats::PackedLinear>(load(*packed));
    } else {
      const auto loaded = tensor(plan.name + ".weight", {plan.n, plan.k});
      weight.matrix = kernels::LinearWeight::Dense{loaded->view(), loaded};
    }
    if (plan.bias) weight.bias = plan.bias_tensor.empty() ? vector(plan.name + ".bias", plan.n) : bias_row(plan);
    return weight;
  }

  /// Of a tensor that holds the biases of several linears.
  std::vector<float> bias_row(const PlannedLinear& plan) const {
    const auto& info = folder_.tensors.at(plan.bias_tensor);
    const int64_t rows = info.shape.empty() ? 0 : info.shape.front();
    const auto loaded = tensor(plan.bias_tensor, {rows, plan.n});
    ensure(plan.bias_row < rows, "Loader: a bias beyond its tensor");
    const auto width = static_cast<size_t>(plan.n * dtype_bits(info.dtype) / 8);
    std::vector<float> values(static_cast<size_t>(plan.n));
    widen(loaded->view().bytes.subspan(static_cast<size_t>(plan.bias_row) * width, width), info.dtype, values);
    return values;
  }

  std::vector<float> values(const PlannedVector& plan) const {
    const auto loaded = tensor(plan.name, plan.shape);
    std::vector<float> values(static_cast<size_t>(element_count(plan.shape)));
    widen(loaded->view().bytes, loaded->view().dtype, values);
    return values;
  }

  LayerWeights layer(int64_t index) const {
    LayerWeights weights{.plan = layer_plan(config_, index), .norms = {}, .linears = {}, .vectors = {}};
    for (const auto& entry : weights.plan.norms()) weights.norms.push_back(norm(entry));
    for (const auto& entry : weights.plan.linears()) weights.linears.push_back(linear(entry));
    for (const auto& entry : weights.plan.vectors()) weights.vectors.push_back(values(entry));
    return weights;
  }

 private:
  formats::PackedLinear load(const checkpoint::PackedLinearInfo& info) const {
    const auto is_canonical = [](const auto& pass) { return pass.layout == formats::canonical_layout; };
    const bool as_stored =
        planes_ == Planes::stored && info.dialect == nullptr && std::ranges::none_of(info.passes, is_canonical);
    return as_stored ? checkpoint::load_packed(folder_.tensors, info)
                     : checkpoint::load_canonical(folder_.tensors, info);
  }

  const checkpoint::Folder& folder_;
  const ModelConfig& config_;
  const Planes planes_;
};

}  // namespace

void check_weight(const io::Checkpoint& checkpoint, const std::string& name, const Shape& shape) {
  const io::TensorInfo& info = checkpoint.at(name);
  if (info.shape != shape) {
    throw Error(ErrorCode::mismatch, concat(name, ": shape ", shape_text(info.shape), " does not fit config.json"))
        .detail(concat("expected ", shape_text(shape), ", in ", checkpoint.file_of(name)));
  }
  if (!is_weight_dtype(info.dtype)) {
    throw Error(ErrorCode::unsupported, concat(name, ": a weight of type ", dtype_name(info.dtype)))
        .detail("expected F32, F16 or BF16");
  }
}

const kernels::LinearWeight& LayerWeights::linear(Role role) const {
  const auto planned = plan.linears();
  const auto found = std::ranges::find(planned, role, &PlannedLinear::role);
  ensure(found != planned.end(), "LayerWeights: no linear of this role");
  return linears[found->position];
}

bool is_derived_tensor(std::string_view name) noexcept { return name.ends_with("rotary_emb.inv_freq"); }

LayerWeights load_layer(const OpenedModel& model, int64_t index) { return Loader(model).layer(index); }

kernels::LinearWeight load_embeddings(const OpenedModel& model) {
  return Loader(model).linear(embedding_plan(model.config));
}

std::vector<float> load_final_norm(const OpenedModel& model) {
  return Loader(model).norm(final_norm_plan(model.config));
}

kernels::LinearWeight load_head(const OpenedModel& model) {
  return has_tied_head(model) ? load_embeddings(model) : Loader(model).linear(head_plan(model.config));
}

namespace {

std::optional<LayerEmbeddings> layer_embeddings_of(const Loader& loader, const ModelConfig& config) {
  if (config.layer_embedding_size == 0) return {};
  return LayerEmbeddings{loader.linear(layer_embedding_plan(config)), loader.linear(layer_projection_plan(config)),
                         loader.norm(layer_projection_norm_plan(config))};
}

}  // namespace

std::optional<LayerEmbeddings> load_layer_embeddings(const OpenedModel& model) {
  return layer_embeddings_of(Loader(model), model.config);
}

Model Model::open(const std::filesystem::path& folder, bool residual, Planes planes) {
  return of(open_model(folder, residual), planes);
}

Model Model::of(OpenedModel opened, Planes planes, const LayerStage& stage) {
  require_decoder(opened.config, "decoding");
  Model model(std::move(opened));
  ModelConfig& config = model.opened_.config;
  if (!config.tie_word_embeddings && has_tied_head(model.opened_)) {
    config.tied_embeddings = true;
    config.warnings.emplace_back(
        "lm_head.weight is missing and config.json has no tie_word_embeddings: the embeddings serve as the head");
  }
  const LayerRange layers = split_layers(model.opened_, stage.count())[static_cast<size_t>(stage.index())];
  model.config_ = config_of(config, layers);
  model.begins_ = stage.first();
  model.ends_ = stage.last();
  const Loader loader(model.opened_, planes);
  if (stage.first() || (stage.last() && config.tied_embeddings)) {
    model.embeddings_ = loader.linear(embedding_plan(config));
  }
  model.layer_embeddings_ = layer_embeddings_of(loader, config);
  model.layers_.resize(static_cast<size_t>(layers.count()));
  // Of stored planes little is read, and much looked up.
  const int64_t grain = planes == Planes::stored ? 1 : layers.count();
  parallel_for(layers.count(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) model.layers_[static_cast<size_t>(i)] = loader.layer(layers.first + i);
  });
  if (!stage.last()) return model;
  model.final_norm_ = loader.norm(final_norm_plan(config));
  if (!config.tied_embeddings) model.head_ = loader.linear(head_plan(config));
  return model;
}

}  // namespace w4q::model
