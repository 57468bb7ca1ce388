// Who looks at gradients as they go back through a model.
#pragma once

#include <functional>

#include "core/views.h"
#include "model/layer_plan.h"

namespace w4q::model {

/// Sees a linear's inputs [rows, k] and the gradients of the loss by its outputs [rows, n]; the last linears of a layer
/// come first.
using GradientObserver =
    std::function<void(const PlannedLinear& linear, MatrixView<const float> input, MatrixView<const float> gradient)>;

/// Sees what a norm reads [rows, heads · its size] and the gradients of the loss by the normed rows.
using NormObserver =
    std::function<void(const PlannedNorm& norm, MatrixView<const float> x, MatrixView<const float> gradient)>;

}  // namespace w4q::model
