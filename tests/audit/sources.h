// The 16-bit models that variants are made of: the bundled one under the names of several architectures, with weights of
// kinds that sound models have, and models of very small matrices.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace w4q::audit {

std::filesystem::path bundled_model();

/// "llama", "qwen2", "qwen3", "mistral", followed by the kind of their weights where it is not the bundled model's own:
/// "llama ternary"; or "tiny 5": one layer of random weights with 5 channels. `whole`: with all channels of the
/// MLPs.
void write_source(const std::string& name, const std::filesystem::path& folder, bool whole);

/// The same model with its channels in another order: it computes the same and shares no tensor with `name`.
void write_other_source(const std::string& name, const std::filesystem::path& folder, bool whole);

/// "heavy-tailed", "ternary" …
std::vector<std::string> weight_kinds();

}  // namespace w4q::audit
