#include "audit/sources.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "audit/checkpoint_copy.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/text.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;

uint64_t seed_of(std::string_view text) { return test::fingerprint(std::as_bytes(std::span(text))) & 0xFFFF'FFFF; }

/// Channel i of the other model is channel `turned(i)` of this one.
int64_t turned(int64_t i, int64_t count) { return (i * 77 + 31) % count; }

void permute(Tensor& tensor, bool rows, bool columns) {
  const bool vector = tensor.shape.size() == 1;
  const int64_t n = vector ? 1 : tensor.shape[0], k = tensor.shape.back();
  const auto values = values_of(tensor);
  auto result = values;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      const int64_t from_row = rows && !vector ? turned(row, n) : row;
      const int64_t from_col = columns || (vector && rows) ? turned(col, k) : col;
      result[static_cast<size_t>(row * k + col)] = values[static_cast<size_t>(from_row * k + from_col)];
    }
  }
  set_values(tensor, result);
}

/// A third of each MLP's channels: half of the model's weights, and half of the time that the audit takes.
constexpr int64_t inner_channels = 256;

void cut(CheckpointCopy& copy) {
  for (auto& [name, tensor] : copy.tensors) {
    const bool columns = name.find("down_proj") != std::string::npos;
    if (!columns && name.find("gate_proj") == std::string::npos && name.find("up_proj") == std::string::npos) continue;
    const auto values = values_of(tensor);
    const int64_t k = tensor.shape[1], n = columns ? tensor.shape[0] : inner_channels;
    std::vector<float> rest;
    for (int64_t row = 0; row < n; ++row) {
      const auto begin = values.begin() + row * k;
      rest.insert(rest.end(), begin, begin + (columns ? inner_channels : k));
    }
    tensor.shape = {n, columns ? inner_channels : k};
    set_values(tensor, rest);
  }
  copy.config["intermediate_size"] = inner_channels;
}

/// Hidden channels and those of the MLPs in another order; heads stay.
void turn_model(CheckpointCopy& copy) {
  for (auto& [name, tensor] : copy.tensors) {
    const auto is = [&](std::string_view part) { return name.find(part) != std::string::npos; };
    if (is("_norm.") || name.ends_with("_proj.bias")) continue;
    const bool writes = is("o_proj") || is("down_proj"), inside = is("gate_proj") || is("up_proj");
    permute(tensor, writes || inside || is("norm"), !is("o_proj"));
  }
}

void add_vector(CheckpointCopy& copy, const std::string& name, int64_t size, double mean, double spread) {
  const uint64_t seed = std::hash<std::string>{}(name)&0xFFFF;
  std::vector<float> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(mean + spread * random_normal(seed, i));
  Tensor tensor{DType::bf16, {size}, "model.safetensors", {}};
  set_values(tensor, values);
  copy.tensors[name] = std::move(tensor);
}

/// A head of its own: the embeddings, each row a little another one.
void add_head(CheckpointCopy& copy) {
  Tensor head = copy.at("model.embed_tokens.weight");
  auto values = values_of(head);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= static_cast<float>(1.2 + 0.3 * random_normal(5, i));
  set_values(head, values);
  copy.tensors["lm_head.weight"] = std::move(head);
  copy.config["tie_word_embeddings"] = false;
}

void add_biases(CheckpointCopy& copy, std::initializer_list<const char*> linears) {
  for (int64_t layer = 0; layer < 4; ++layer) {
    for (const char* linear : linears) {
      const std::string module = concat("model.layers.", layer, ".self_attn.", linear);
      add_vector(copy, module + ".bias", copy.at(module + ".weight").shape[0], 0, 0.3);
    }
  }
}

void become(CheckpointCopy& copy, const std::string& name) {
  if (name == "llama") return;
  const auto rename = [&](const char* type, const char* class_name) {
    copy.config["model_type"] = type;
    copy.config["architectures"] = {class_name};
    copy.config.erase("attention_bias");
    copy.config.erase("mlp_bias");
  };
  if (name == "qwen2") {
    rename("qwen2", "Qwen2ForCausalLM");
    add_biases(copy, {"q_proj", "k_proj", "v_proj"});
    add_head(copy);
  } else if (name == "mistral") {
    rename("mistral", "MistralForCausalLM");
    copy.config["sliding_window"] = 64;
  } else {
    rename("qwen3", "Qwen3ForCausalLM");
    for (int64_t layer = 0; layer < 4; ++layer) {
      for (const char* norm : {"q_norm", "k_norm"}) {
        add_vector(copy, concat("model.layers.", layer, ".self_attn.", norm, ".weight"), 64, 1.5, 0.4);
      }
    }
  }
}

// ---- kinds of weights -----------------------------------------------------------------------------------------------

/// A matrix in fp32, with what its changes are drawn from.
struct Matrix {
  std::string_view name;
  std::vector<float>& values;
  int64_t n, k;
  uint64_t seed;

  double rms() const {
    double sum = 0;
    for (const float value : values) sum += double{value} * double{value};
    return std::sqrt(sum / static_cast<double>(values.size()));
  }
  void each(const std::function<float(float value, int64_t row, int64_t col)>& how) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = how(values[i], static_cast<int64_t>(i) / k, static_cast<int64_t>(i) % k);
    }
  }
  double uniform(int64_t i) const { return random_uniform(seed, static_cast<uint64_t>(i)); }
};

struct WeightKind {
  std::string_view name;
  void (*change)(Matrix& matrix);  ///< of the linears of layers
};

constexpr WeightKind kinds[] = {
    {"heavy-tailed",
     [](Matrix& m) {
       m.each([&](float value, int64_t row, int64_t col) {
         return value / static_cast<float>(m.uniform(row * m.k + col) + 0.02);
       });
     }},
    {"ternary",
     [](Matrix& m) {
       const auto size = static_cast<float>(m.rms());
       m.each([&](float value, int64_t, int64_t) {
         return std::abs(value) < 0.6f * size ? 0 : std::copysign(size, value);
       });
     }},
    {"binary",
     [](Matrix& m) {
       const auto size = static_cast<float>(m.rms());
       m.each([&](float value, int64_t, int64_t) { return std::copysign(size, value); });
     }},
    {"pruned",
     [](Matrix& m) {
       const auto size = static_cast<float>(m.rms());
       m.each([&](float value, int64_t, int64_t) { return std::abs(value) < size ? 0 : value; });
     }},
    {"pruned two of four",
     [](Matrix& m) { m.each([](float value, int64_t row, int64_t col) { return (col + row) % 4 < 2 ? 0 : value; }); }},
    {"loud columns",
     [](Matrix& m) { m.each([](float value, int64_t, int64_t col) { return col % 61 == 7 ? 30 * value : value; }); }},
    {"loud rows",
     [](Matrix& m) {
       m.each([&](float value, int64_t row, int64_t) {
         return value * std::exp2(static_cast<float>(6 * m.uniform(row)));
       });
     }},
    {"dead rows and columns",
     [](Matrix& m) {
       m.each([](float value, int64_t row, int64_t col) { return row % 37 == 3 || col % 53 == 11 ? 0 : value; });
     }},
    {"normal",
     [](Matrix& m) {
       const double size = m.rms();
       m.each([&](float, int64_t row, int64_t col) {
         return static_cast<float>(size * random_normal(m.seed, static_cast<uint64_t>(row * m.k + col)));
       });
     }},
    {"uniform",
     [](Matrix& m) {
       const double size = m.rms();
       m.each([&](float, int64_t row, int64_t col) {
         return static_cast<float>(size * (2 * m.uniform(row * m.k + col) - 1));
       });
     }},
    {"positive", [](Matrix& m) { m.each([](float value, int64_t, int64_t) { return std::abs(value); }); }},
    {"very small", [](Matrix& m) { m.each([](float value, int64_t, int64_t) { return 0.001f * value; }); }},
    {"of low rank",
     [](Matrix& m) {
       const double size = m.rms();
       m.each([&](float value, int64_t row, int64_t col) {
         const double outer =
             random_normal(m.seed, static_cast<uint64_t>(row)) * random_normal(m.seed + 1, static_cast<uint64_t>(col));
         return static_cast<float>(size * outer + 0.05 * value);
       });
     }},
    {"one of zeros",
     [](Matrix& m) {
       if (m.name == "model.layers.2.self_attn.o_proj.weight") std::ranges::fill(m.values, 0.0f);
     }},
};

/// What sound models have beside their linears: unused tokens without an embedding, norms with channels next to zero.
void thin_out(CheckpointCopy& copy) {
  for (auto& [name, tensor] : copy.tensors) {
    auto values = values_of(tensor);
    const auto width = static_cast<size_t>(tensor.shape.back());
    if (name == "model.embed_tokens.weight") std::fill_n(values.begin() + 300 * 256, 40 * width, 0.0f);
    if (name.find("layernorm") != std::string::npos) {
      for (size_t i = 3; i < values.size(); i += 17) values[i] = i % 2 == 0 ? 1e-4f : -values[i];
    }
    set_values(tensor, values);
  }
}

/// Layers 2 and 3 are copies of 0 and 1, as models that were made deeper begin.
void deepen(CheckpointCopy& copy) {
  for (auto& [name, tensor] : copy.tensors) {
    for (const int layer : {2, 3}) {
      const std::string part = concat(".layers.", layer, ".");
      const size_t at = name.find(part);
      if (at == std::string::npos) continue;
      tensor.bytes = copy.at(std::string(name).replace(at, part.size(), concat(".layers.", layer - 2, "."))).bytes;
    }
  }
}

void change_weights(CheckpointCopy& copy, std::string_view kind) {
  if (kind == "thinned out") return thin_out(copy);
  if (kind == "deepened") return deepen(copy);
  const auto row = std::ranges::find(kinds, kind, &WeightKind::name);
  ensure(row != std::end(kinds), concat("weights of kind ", kind));
  for (auto& [name, tensor] : copy.tensors) {
    if (!name.ends_with("_proj.weight")) continue;
    auto values = values_of(tensor);
    Matrix matrix{name, values, tensor.shape[0], tensor.shape[1], seed_of(name)};
    row->change(matrix);
    set_values(tensor, values);
  }
}

// ---- small matrices -------------------------------------------------------------------------------------------------

CheckpointCopy tiny(int64_t channels) {
  CheckpointCopy copy;
  const int64_t head = 4, inner = channels + 1, vocabulary = 12;
  copy.config = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"hidden_size", channels},
                 {"intermediate_size", inner},
                 {"num_hidden_layers", 1},
                 {"num_attention_heads", 2},
                 {"num_key_value_heads", 1},
                 {"head_dim", head},
                 {"vocab_size", vocabulary},
                 {"max_position_embeddings", 64},
                 {"rms_norm_eps", 1e-5},
                 {"rope_theta", 10000.0},
                 {"tie_word_embeddings", true},
                 {"torch_dtype", "bfloat16"}};
  const auto add = [&](const std::string& name, int64_t n, int64_t k) {
    add_vector(copy, name, n * k, 0, 0.4);
    copy.at(name).shape = {n, k};
  };
  const std::string layer = "model.layers.0.";
  add("model.embed_tokens.weight", vocabulary, channels);
  for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) {
    add_vector(copy, concat(layer, norm, ".weight"), channels, 1, 0.1);
  }
  add_vector(copy, "model.norm.weight", channels, 1, 0.1);
  add(layer + "self_attn.q_proj.weight", 2 * head, channels);
  add(layer + "self_attn.k_proj.weight", head, channels);
  add(layer + "self_attn.v_proj.weight", head, channels);
  add(layer + "self_attn.o_proj.weight", channels, 2 * head);
  add(layer + "mlp.gate_proj.weight", inner, channels);
  add(layer + "mlp.up_proj.weight", inner, channels);
  add(layer + "mlp.down_proj.weight", channels, inner);
  return copy;
}

CheckpointCopy source(const std::string& name, bool whole) {
  const size_t space = std::min(name.find(' '), name.size());
  const std::string architecture = name.substr(0, space), kind = space < name.size() ? name.substr(space + 1) : "";
  if (architecture == "tiny") return tiny(std::atoll(kind.c_str()));
  CheckpointCopy copy = CheckpointCopy::of(checkpoint::open_folder(bundled_model()));
  if (!whole) cut(copy);
  become(copy, architecture);
  if (!kind.empty()) change_weights(copy, kind);
  return copy;
}

}  // namespace

fs::path bundled_model() { return test::testdata() / "w4q-llama-tiny"; }

void write_source(const std::string& name, const fs::path& folder, bool whole) { source(name, whole).write(folder); }

void write_other_source(const std::string& name, const fs::path& folder, bool whole) {
  CheckpointCopy copy = source(name, whole);
  turn_model(copy);
  copy.write(folder);
}

std::vector<std::string> weight_kinds() {
  std::vector<std::string> names = {"thinned out", "deepened"};
  for (const auto& kind : kinds) names.emplace_back(kind.name);
  return names;
}

}  // namespace w4q::audit
