// The sizes of well-known models, for measurements on random weights.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace w4q::model {

/// "llama3-8b", "llama2-7b", "qwen3-8b" … Throws bad_argument and lists the names.
ModelConfig named_shape(std::string_view name);
std::vector<std::string> shape_names();

}  // namespace w4q::model
