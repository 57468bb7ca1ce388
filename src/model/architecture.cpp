#include "model/architecture.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "model/architecture/rows.h"

namespace w4q::model {

std::span<const ArchitectureRow* const> architectures() noexcept {
  static constexpr std::array rows = {
      &llama_architecture,        &mistral_architecture,    &ministral3_architecture,  &mixtral_architecture,
      &qwen2_architecture,        &qwen2_moe_architecture,  &qwen3_architecture,       &qwen3_moe_architecture,
      &qwen3_next_architecture,   &qwen3_5_architecture,    &qwen3_5_moe_architecture, &qwen3_vl_architecture,
      &qwen3_vl_moe_architecture, &gemma2_architecture,     &gemma3_architecture,      &gemma4_architecture,
      &gpt_oss_architecture,      &glm4_architecture,       &glm4_moe_architecture,    &minimax_m2_architecture,
      &phi3_architecture,         &smollm3_architecture,    &olmo2_architecture,       &olmo3_architecture,
      &exaone4_architecture,      &granitemoe_architecture, &granite_architecture,     &ernie4_5_moe_architecture,
      &ernie4_5_architecture,     &seed_oss_architecture,   &olmoe_architecture};
  return rows;
}

const ArchitectureRow& architecture_row(std::string_view model_type) {
  const auto found = std::ranges::find(architectures(), model_type, &ArchitectureRow::model_type);
  ensure(found != architectures().end(), "architecture_row: no such model_type");
  return **found;
}

}  // namespace w4q::model
