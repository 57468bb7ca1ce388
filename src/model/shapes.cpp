#include "model/shapes.h"

#include "core/error.h"
#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {
namespace {

struct ShapeRow {
  std::string_view name;
  std::string_view model_type;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  double theta;
  bool tied, qk_norm;
};
constexpr ShapeRow shapes[] = {
    {"llama3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, false, false},
    {"llama2-7b", "llama", 4096, 11008, 32, 32, 32, 128, 32000, 1e4, false, false},
    {"mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 1e6, false, false},
    {"qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, false, true},
    {"llama3-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5, true, false},
    {"llama3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 5e5, false, false},
};

}  // namespace

ModelConfig named_shape(std::string_view name) {
  for (const auto& row : shapes) {
    if (row.name != name) continue;
    ModelConfig config;
    config.architecture = &architecture_row(row.model_type);
    config.architecture_name = row.name;
    config.hidden_size = row.hidden;
    config.intermediate_size = row.intermediate;
    config.layers = row.layers;
    config.heads = row.heads;
    config.kv_heads = row.kv_heads;
    config.head_dim = row.head_dim;
    config.vocab_size = row.vocab;
    config.max_positions = int64_t{1} << 17;
    config.tied_embeddings = row.tied;
    config.qk_norm = row.qk_norm;
    config.rope.theta = row.theta;
    config.sliding_window.assign(static_cast<size_t>(row.layers), 0);
    return config;
  }
  throw Error(ErrorCode::bad_argument, concat("--shape ", printable(name), ": unknown"))
      .detail("known: " + join(shape_names()));
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const auto& row : shapes) names.emplace_back(row.name);
  return names;
}

}  // namespace w4q::model
