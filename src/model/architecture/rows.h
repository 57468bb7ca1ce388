// The rows that architecture.cpp lists.
#pragma once

#include "model/architecture.h"
#include "model/architecture/blocks.h"

namespace w4q::model {

extern const ArchitectureRow llama_architecture, mistral_architecture, qwen2_architecture, qwen3_architecture;

}  // namespace w4q::model
