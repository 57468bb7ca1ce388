// Whether a tensor that was kept holds the base's values, as they are or as a program leaves them that passes them through a
// 16-bit type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/views.h"
#include "model/layer_plan.h"
#include "model/opened.h"

namespace w4q::verify {

/// The values [begin, end) of a tensor of a weight's type, in fp32.
std::vector<float> values_of(const TensorView& tensor, int64_t begin, int64_t end);

/// The first value that is neither the base's nor that rounded to the type of `ours`; −1: none. Equal shapes.
int64_t first_difference(const TensorView& ours, const TensorView& theirs);

/// Whether all values are the base's, rounded to their type, or as a model in 16 bit holds them although the type could say
/// more; of a norm that is stored less `offset`, also as a program leaves them that computes with the sum. Equal shapes.
bool hold_same_values(const TensorView& ours, const TensorView& theirs, float offset);

/// hold_same_values() of a tensor by its name. False where one of the two lacks it, or its shape is another.
bool holds_base_values(const model::OpenedModel& candidate, const model::OpenedModel& base, const std::string& name,
                       float offset = 0);
/// The same of a norm's weight.
bool holds_base_values(const model::OpenedModel& candidate, const model::OpenedModel& base,
                       const model::PlannedNorm& norm);

}  // namespace w4q::verify
