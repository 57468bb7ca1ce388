// Runs windows of text through models and others beside them, from scratch each, and scores their tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/attention/kv_page.h"
#include "kernels/sampling/logits.h"
#include "verify/perplexity.h"

namespace w4q::verify {

/// What each candidate and each base beside it, in their order, bases within candidates, say of inputs first_scored …
/// of a window, in theirs; nothing where one of the two computes values that are not finite. Every model decodes the
/// window once. Without a base one list for each candidate, in which only nll_b is set.
using WindowScorer = std::function<std::vector<std::vector<kernels::LogitComparison>>(std::span<const int32_t> inputs,
                                                                                      int64_t first_scored)>;

/// Windows of up to `capacity` tokens. The models must outlive the scorer. `int8_activations`: of the candidates, also
/// where one is a base itself, which then has 16-bit ones; throws as model::check_int8_activations. Of models that
/// several processes hold together, each scores the same windows at its `stage`, and the last one says what came out.
WindowScorer cpu_window_scorer(std::span<const model::Model* const> candidates, std::span<const BaseModel> bases,
                               int64_t capacity, bool int8_activations = false, const model::LayerStage& stage = {});

/// The same on a GPU, with a cache of this type and so many bytes of each candidate's residual passes there. Throws
/// device where it has no room for all models, or where this program was built without CUDA.
WindowScorer cuda_window_scorer(device::Context& gpu, std::span<const model::Model* const> candidates,
                                std::span<const BaseModel> bases, int64_t capacity, kernels::KvChoice kv,
                                std::optional<int64_t> residual_bytes = {}, bool int8_activations = false,
                                const model::LayerStage& stage = {});

}  // namespace w4q::verify
