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
      &ernie4_5_architecture,     &seed_oss_architecture,   &olmoe_architecture,       &qwen2_vl_architecture,
      &qwen2_5_vl_architecture,   &gemma_architecture,      &glm_architecture,         &glm4v_architecture,
      &glm4v_moe_architecture,    &dots1_architecture};
  return rows;
}

std::span<const std::string_view> wrappers_of_any() noexcept {
  static constexpr std::array<std::string_view, 25> names = {
      "AudioFlamingo3ForConditionalGeneration", "DeepseekVLForConditionalGeneration",
      "Exaone4_5_ForConditionalGeneration",     "GlmAsrForConditionalGeneration",
      "GotOcr2ForConditionalGeneration",        "Idefics2ForConditionalGeneration",
      "Idefics3ForConditionalGeneration",       "InternVLForConditionalGeneration",
      "LightOnOcrForConditionalGeneration",     "LlavaForConditionalGeneration",
      "LlavaNextForConditionalGeneration",      "LlavaNextVideoForConditionalGeneration",
      "LlavaOnevisionForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
      "Mistral3ForConditionalGeneration",       "MossTranscribeDiarizeForConditionalGeneration",
      "MusicFlamingoForConditionalGeneration",  "Ovis2ForConditionalGeneration",
      "Qwen2AudioForConditionalGeneration",     "Qwen3ASRForConditionalGeneration",
      "SmolVLMForConditionalGeneration",        "VideoLlama3ForConditionalGeneration",
      "VideoLlavaForConditionalGeneration",     "VipLlavaForConditionalGeneration",
      "VoxtralForConditionalGeneration"};
  return names;
}

const ArchitectureRow& architecture_row(std::string_view model_type) {
  const auto found = std::ranges::find(architectures(), model_type, &ArchitectureRow::model_type);
  ensure(found != architectures().end(), "architecture_row: no such model_type");
  return **found;
}

}  // namespace w4q::model
