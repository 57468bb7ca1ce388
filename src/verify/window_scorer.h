// Runs windows of text through one or two models, from scratch each, and scores their tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kv_page.h"
#include "kernels/logits.h"
#include "model/model.h"

namespace w4q::verify {

/// What the models say of inputs first_scored … of a window, in their order; nothing where one of them computes values
/// that are not finite. Without a base only nll_b is set.
using WindowScorer =
    std::function<std::vector<kernels::LogitComparison>(std::span<const int32_t> inputs, int64_t first_scored)>;

/// Windows of up to `capacity` tokens. `base` may be null; the models must outlive the scorer. `int8_activations`: of
/// the candidate; throws as model::check_int8_activations.
WindowScorer cpu_window_scorer(const model::Model& candidate, const model::Model* base, int64_t capacity,
                               bool int8_activations = false);

/// The same on the GPU, with caches of the given types and so many bytes of the candidate's residual passes there.
/// Throws device where there is none to use, or this program was built without CUDA.
WindowScorer cuda_window_scorer(const model::Model& candidate, const model::Model* base, int64_t capacity,
                                kernels::KvChoice kv, kernels::KvChoice base_kv,
                                std::optional<int64_t> residual_bytes = {}, bool int8_activations = false);

}  // namespace w4q::verify
