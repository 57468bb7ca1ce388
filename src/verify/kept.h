// What another program kept in 16 bit beside its packed weights, held against the base: it may have rounded it to another
// 16-bit type, and given norms one positive factor a channel that the weights behind them carry (docs/verify.md).
#pragma once

#include "model/opened.h"
#include "verify/report.h"

namespace w4q::verify {

/// Kept parameters and what config.json says that the model computes. That packed weights carry the factors of their
/// norms is for weights.h to ask. Throws as loading does.
Check check_kept(const model::OpenedModel& candidate, const model::OpenedModel& base);

/// Whether a kept parameter of the candidate holds the base's values, or those rounded to its own type. False where one
/// of the two lacks it.
bool holds_base_values(const model::OpenedModel& candidate, const model::OpenedModel& base, const std::string& name);

}  // namespace w4q::verify
