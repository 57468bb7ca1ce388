// Which products of a model each of several ranks checks, and what they find put together.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/layer_stage.h"
#include "ranks/ranks.h"
#include "verify/products/kernel_check.h"

namespace w4q::verify {

/// The part of a model that a rank loads where all check it: stretches of its layers where these can be cut so, in as many
/// as there are ranks or the largest of its divisors that there are layers for; otherwise all of it.
model::LayerStage kernel_stage(ranks::Ranks& ranks, const model::OpenedModel& model);

/// What `check(i)` finds of each of the `items` of a stage, for all stages, in their order, at every rank; ranks that hold
/// the same stage take the items in turn. Throws at every rank what it throws at one.
KernelReport check_together(ranks::Ranks& ranks, const model::LayerStage& stage, int64_t items,
                            const std::function<std::vector<KernelError>(int64_t item)>& check);

}  // namespace w4q::verify
