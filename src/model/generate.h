// Greedy and sampled generation.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "model/decoder.h"

namespace w4q::model {

using SamplingOptions = kernels::SamplingOptions;

/// Throws bad_argument for an empty prompt, a negative count, options out of range or more tokens in all than the model
/// has positions.
void check_generation(const ModelConfig& config, std::span<const int32_t> prompt, int64_t max_tokens,
                      const SamplingOptions& sampling);
/// Throws bad_file: token `index` cannot be drawn, since no largest logit is finite.
[[noreturn]] void refuse_logits(int64_t index);
/// Whether a token ends sequences of this model.
bool ends_sequence(const ModelConfig& config, int32_t token) noexcept;

/// Appends up to `max_tokens` tokens to `prompt` and returns the new ones; stops after an end-of-sequence token of the
/// config, which is returned too. `on_token` (may be empty) sees each new token and stops the generation by returning
/// false. Deterministic for a given seed and machine, for any thread count. Throws as check_generation.
/// `int8_activations`: of the prompt (int8_activations.h). Processes that hold the model together all call it, each with
/// its stage, and get the same tokens.
std::vector<int32_t> generate(const Model& model, std::span<const int32_t> prompt, int64_t max_tokens,
                              const SamplingOptions& sampling, const std::function<bool(int32_t)>& on_token,
                              bool int8_activations = false, const LayerStage& stage = {});

}  // namespace w4q::model
