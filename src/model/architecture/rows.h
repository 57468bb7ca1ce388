// The rows that architecture.cpp lists.
#pragma once

#include "model/architecture.h"
#include "model/architecture/blocks.h"

namespace w4q::model {

extern const ArchitectureRow dots1_architecture, ernie4_5_architecture, ernie4_5_moe_architecture, exaone4_architecture,
    gemma_architecture, gemma2_architecture, gemma3_architecture, gemma4_architecture, glm4_architecture,
    glm4_moe_architecture, glm4v_architecture, glm4v_moe_architecture, glm_architecture, gpt_oss_architecture,
    granite_architecture, granitemoe_architecture, llama_architecture, minimax_m2_architecture, ministral3_architecture,
    mistral_architecture, mixtral_architecture, olmo2_architecture, olmo3_architecture, olmoe_architecture,
    phi3_architecture, qwen2_architecture, qwen2_5_vl_architecture, qwen2_moe_architecture, qwen2_vl_architecture,
    qwen3_architecture, qwen3_5_architecture, qwen3_5_moe_architecture, qwen3_moe_architecture, qwen3_next_architecture,
    qwen3_vl_architecture, qwen3_vl_moe_architecture, seed_oss_architecture, smollm3_architecture;

}  // namespace w4q::model
