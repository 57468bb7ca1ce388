// Small models that GPU tests run over: every architecture as it usually is, and settings that few models have.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "model/architecture.h"
#include "small_model.h"

namespace w4q::test {

struct SmallSetting {
  const model::ArchitectureRow* row;
  std::string name;  ///< of the setting, as a part of a test's name; empty: as it usually is
  io::Json changes = io::Json::object();
};

inline std::vector<SmallSetting> small_settings() {
  std::vector<SmallSetting> settings;
  const model::ArchitectureRow* llama = nullptr;
  const model::ArchitectureRow* olmoe = nullptr;
  for (const auto* row : model::architectures()) {
    settings.push_back({row, "", io::Json::object()});
    if (row->model_type == "llama") llama = row;
    if (row->model_type == "olmoe") olmoe = row;
  }
  for (const char* activation : {"gelu", "gelu_pytorch_tanh", "relu", "relu2", "relu6", "leaky_relu", "sigmoid", "tanh",
                                 "quick_gelu", "linear", "mish", "hardswish"}) {
    settings.push_back({llama, activation, {{"hidden_act", activation}}});
  }
  settings.push_back({olmoe, "clip", {{"clip_qkv", 0.75}}});
  return settings;
}

inline std::string setting_name(const SmallSetting& setting) {
  return setting.name.empty() ? row_name(setting.row) : row_name(setting.row) + "_" + setting.name;
}
inline void PrintTo(const SmallSetting& setting, std::ostream* out) { *out << setting_name(setting); }

}  // namespace w4q::test
