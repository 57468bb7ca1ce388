// What config.json says that a model computes, beside what its base's says.
#pragma once

#include <string>
#include <vector>

#include "model/config.h"

namespace w4q::verify {

/// What is computed otherwise though all tensors were the same, of two configs of one architecture: activation, caps and
/// factors, layers' attention, delta nets and the choice of experts, by key; "num_experts_per_tok is 4, in the base 2".
/// Reals are the same to 1e-6. Where experts stand in the files, and what
/// `check_kept` compares by itself (sizes, heads, eps, rope, windows, bos and eos), is not looked at. Empty: nothing is.
std::vector<std::string> computed_otherwise(const model::ModelConfig& ours, const model::ModelConfig& theirs);

}  // namespace w4q::verify
