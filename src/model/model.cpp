#include "model/model.h"

#include <utility>

#include "core/convert.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::model {
namespace {

std::string layer_prefix(int64_t layer) { return concat("model.layers.", layer, "."); }

/// Collects a layer's or a model's parameters in model order.
class ParameterList {
 public:
  void norm(std::string name, int64_t size) { list_.push_back({std::move(name), {size}, false}); }
  void linear(const std::string& name, int64_t n, int64_t k, bool bias) {
    list_.push_back({name + ".weight", {n, k}, true});
    if (bias) list_.push_back({name + ".bias", {n}, false});
  }
  std::vector<Parameter> take() { return std::move(list_); }

 private:
  std::vector<Parameter> list_;
};

void add_layer(const ModelConfig& config, int64_t layer, ParameterList& list) {
  const std::string prefix = layer_prefix(layer), attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t query_width = config.heads * config.head_dim, key_width = config.kv_heads * config.head_dim;
  list.norm(prefix + "input_layernorm.weight", hidden);
  list.linear(attention + "q_proj", query_width, hidden, config.qkv_bias);
  list.linear(attention + "k_proj", key_width, hidden, config.qkv_bias);
  list.linear(attention + "v_proj", key_width, hidden, config.qkv_bias);
  list.linear(attention + "o_proj", hidden, query_width, config.output_bias);
  if (config.qk_norm) {
    list.norm(attention + "q_norm.weight", config.head_dim);
    list.norm(attention + "k_norm.weight", config.head_dim);
  }
  list.norm(prefix + "post_attention_layernorm.weight", hidden);
  list.linear(mlp + "gate_proj", inner, hidden, config.mlp_bias);
  list.linear(mlp + "up_proj", inner, hidden, config.mlp_bias);
  list.linear(mlp + "down_proj", hidden, inner, config.mlp_bias);
}

/// Loads parameters from a checkpoint and checks each against what the architecture expects.
class Loader {
 public:
  Loader(const io::Checkpoint& checkpoint, const checkpoint::QuantizationConfig& quantization)
      : checkpoint_(checkpoint), quantization_(quantization) {}

  /// A 16-bit or fp32 tensor of exactly this shape.
  std::shared_ptr<const io::LoadedTensor> tensor(const std::string& name, const Shape& shape) const {
    const io::TensorInfo& info = checkpoint_.at(name);
    if (info.shape != shape) {
      throw Error(ErrorCode::mismatch, concat(name, ": shape ", shape_text(info.shape), " does not fit config.json"))
          .detail(concat("expected ", shape_text(shape), ", in ", checkpoint_.file_of(name)));
    }
    if (!is_weight_dtype(info.dtype)) {
      throw Error(ErrorCode::unsupported, concat(name, ": a weight of type ", dtype_name(info.dtype)))
          .detail("expected F32, F16 or BF16");
    }
    return std::make_shared<const io::LoadedTensor>(checkpoint_.load(name));
  }

  std::vector<float> vector(const std::string& name, int64_t size) const {
    const auto loaded = tensor(name, {size});
    std::vector<float> values(static_cast<size_t>(size));
    widen(loaded->view().bytes, loaded->view().dtype, values);
    return values;
  }

  kernels::LinearWeight linear(const std::string& name, int64_t n, int64_t k, bool bias) const {
    kernels::LinearWeight weight{.name = name, .n = n, .k = k, .matrix = {}, .bias = {}};
    if (const checkpoint::PackedLinearInfo* packed = quantization_.find(name)) {
      if (packed->n != n || packed->k != k) {
        throw Error(ErrorCode::mismatch, concat(name, ": packed as ", shape_text({packed->n, packed->k})))
            .detail(concat("expected ", shape_text({n, k}), " from the sizes in config.json"));
      }
      weight.matrix = std::make_shared<const formats::PackedLinear>(checkpoint::load_canonical(checkpoint_, *packed));
    } else {
      const auto loaded = tensor(name + ".weight", {n, k});
      weight.matrix = kernels::LinearWeight::Dense{loaded->view(), loaded};
    }
    if (bias) weight.bias = vector(name + ".bias", n);
    return weight;
  }

  LayerWeights layer(const ModelConfig& config, int64_t index) const {
    const std::string prefix = layer_prefix(index), attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
    const int64_t query_width = config.heads * config.head_dim, key_width = config.kv_heads * config.head_dim;
    LayerWeights weights;
    weights.input_norm = vector(prefix + "input_layernorm.weight", hidden);
    weights.post_attention_norm = vector(prefix + "post_attention_layernorm.weight", hidden);
    if (config.qk_norm) {
      weights.q_norm = vector(attention + "q_norm.weight", config.head_dim);
      weights.k_norm = vector(attention + "k_norm.weight", config.head_dim);
    }
    weights.q = linear(attention + "q_proj", query_width, hidden, config.qkv_bias);
    weights.k = linear(attention + "k_proj", key_width, hidden, config.qkv_bias);
    weights.v = linear(attention + "v_proj", key_width, hidden, config.qkv_bias);
    weights.o = linear(attention + "o_proj", hidden, query_width, config.output_bias);
    weights.gate = linear(mlp + "gate_proj", inner, hidden, config.mlp_bias);
    weights.up = linear(mlp + "up_proj", inner, hidden, config.mlp_bias);
    weights.down = linear(mlp + "down_proj", hidden, inner, config.mlp_bias);
    return weights;
  }

 private:
  const io::Checkpoint& checkpoint_;
  const checkpoint::QuantizationConfig& quantization_;
};

/// Settles whether the head is tied when config.json does not say.
void settle_head(const io::Checkpoint& checkpoint, const checkpoint::QuantizationConfig& quantization,
                 ModelConfig& config) {
  if (config.tie_word_embeddings) return;
  if (checkpoint.contains("lm_head.weight") || quantization.find("lm_head") != nullptr) return;
  config.tied_embeddings = true;
  config.warnings.emplace_back(
      "lm_head.weight is missing and config.json has no tie_word_embeddings: the embeddings serve as the head");
}

}  // namespace

std::string_view module_path(std::string_view tensor_name) noexcept {
  constexpr std::string_view suffix = ".weight";
  return tensor_name.ends_with(suffix) ? tensor_name.substr(0, tensor_name.size() - suffix.size()) : tensor_name;
}

std::vector<Parameter> parameters(const ModelConfig& config) {
  ParameterList list;
  list.linear("model.embed_tokens", config.vocab_size, config.hidden_size, false);
  for (int64_t layer = 0; layer < config.layers; ++layer) add_layer(config, layer, list);
  list.norm("model.norm.weight", config.hidden_size);
  if (!config.tied_embeddings) list.linear("lm_head", config.vocab_size, config.hidden_size, false);
  return list.take();
}

bool is_derived_tensor(std::string_view name) noexcept { return name.ends_with("rotary_emb.inv_freq"); }

LayerWeights load_layer(const io::Checkpoint& checkpoint, const checkpoint::QuantizationConfig& quantization,
                        const ModelConfig& config, int64_t index) {
  ensure(index >= 0 && index < config.layers, "load_layer: no such layer");
  return Loader(checkpoint, quantization).layer(config, index);
}

kernels::LinearWeight load_embeddings(const io::Checkpoint& checkpoint,
                                      const checkpoint::QuantizationConfig& quantization, const ModelConfig& config) {
  return Loader(checkpoint, quantization).linear("model.embed_tokens", config.vocab_size, config.hidden_size, false);
}

Model Model::open(const std::filesystem::path& folder, bool residual) {
  ModelConfig config = read_config(folder);
  const auto config_path = folder / "config.json";
  io::Checkpoint checkpoint = io::Checkpoint::open(folder, residual);
  auto quantization = checkpoint::read_quantization(io::read_json(config_path), checkpoint, config_path.string());
  return of(std::move(checkpoint), std::move(config), std::move(quantization));
}

Model Model::of(io::Checkpoint checkpoint, ModelConfig of_model, checkpoint::QuantizationConfig quantization) {
  Model model;
  model.config_ = std::move(of_model);
  model.quantization_ = std::move(quantization);
  model.checkpoint_ = std::make_unique<io::Checkpoint>(std::move(checkpoint));
  settle_head(*model.checkpoint_, model.quantization_, model.config_);

  const ModelConfig& config = model.config_;
  const Loader loader(*model.checkpoint_, model.quantization_);
  model.embeddings_ = loader.linear("model.embed_tokens", config.vocab_size, config.hidden_size, false);
  for (int64_t layer = 0; layer < config.layers; ++layer) model.layers_.push_back(loader.layer(config, layer));
  model.final_norm_ = loader.vector("model.norm.weight", config.hidden_size);
  if (!config.tied_embeddings) model.head_ = loader.linear("lm_head", config.vocab_size, config.hidden_size, false);
  return model;
}

}  // namespace w4q::model
