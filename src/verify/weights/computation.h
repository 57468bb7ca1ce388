// What config.json says that a model computes, beside what its base's says.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::verify {

/// What is computed otherwise though all tensors were the same, of two configs of one architecture: activation, caps and
/// factors, layers' attention, delta nets and the choice of experts, by key; "num_experts_per_tok is 4, in the base 2".
/// Reals are the same to 1e-6. Where experts stand in the files, and what
/// `check_kept` compares by itself (sizes, heads, eps, rope, windows, bos and eos), is not looked at. Empty: nothing is.
std::vector<std::string> computed_otherwise(const model::ModelConfig& ours, const model::ModelConfig& theirs);

/// Whether two versions of a model end with the same tokens, where both say with which; of two folders of which one has
/// generation_config.json, which says more, as both config.json say.
bool ends_alike(const checkpoint::Folder& ours, const model::ModelConfig& our_config, const checkpoint::Folder& theirs,
                const model::ModelConfig& their_config);

/// Of an architecture that is not known: what both config.json say, and not the same, but for what programs write of
/// themselves; positions' settings also where one has them in rope_parameters and the other beside it. Empty: nothing is.
std::vector<std::string> stated_otherwise(const io::Json& ours, const io::Json& theirs);

}  // namespace w4q::verify
