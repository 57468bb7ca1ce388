// Models whose prompts run with int8 activations (kernels/linear/int8_rows.h): every packed linear of a layer
// multiplies rows of int8, layers kept in 16 bits and the head multiply as ever. Calls of fewer tokens than
// least_int8_rows, a step of generation among them, are not concerned.
#pragma once

#include <string_view>

#include "model/model.h"

namespace w4q::model {

/// Throws unsupported, naming the first layer that has no such product, or when no layer has.
void check_int8_activations(const Model& model);
/// Of a part of a model: whether any layer has such a product. Throws unsupported, naming the first packed one without.
bool any_int8_activations(const Model& model);

/// What it throws for a layer, which is `found`.
[[noreturn]] void refuse_int8_activations(std::string_view layer, std::string_view found);
/// … and where no layer has one.
[[noreturn]] void refuse_without_int8_activations();

}  // namespace w4q::model
