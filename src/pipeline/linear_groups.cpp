#include "pipeline/linear_groups.h"

#include "core/text.h"

namespace w4q::pipeline {

std::array<LinearGroup, groups_per_layer> linear_groups(const model::ModelConfig& config, int64_t layer) {
  const std::string prefix = concat("model.layers.", layer, ".");
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  return {LinearGroup{{attention + "q_proj", attention + "k_proj", attention + "v_proj"}, config.hidden_size},
          LinearGroup{{attention + "o_proj"}, config.heads * config.head_dim},
          LinearGroup{{mlp + "gate_proj", mlp + "up_proj"}, config.hidden_size},
          LinearGroup{{mlp + "down_proj"}, config.intermediate_size}};
}

formats::Rotation run_time_rotation(const quantize::QuantizeOptions& options, std::string_view module) {
  const bool folded = options.folded && !module.ends_with(".mlp.down_proj");
  return folded ? formats::Rotation{} : options.rotation;
}

}  // namespace w4q::pipeline
