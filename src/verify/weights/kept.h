// What another program kept in 16 bit beside its packed weights, held against the base: it may have rounded it to another
// 16-bit type, and given norms one positive factor a channel that the weights behind them carry (docs/verify.md).
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "model/opened.h"
#include "verify/report.h"

namespace w4q::verify {

/// Kept parameters and what config.json says that the model computes. That packed weights carry the factors of their
/// norms is for weights.h to ask. Throws as loading does.
Check check_kept(const model::OpenedModel& candidate, const model::OpenedModel& base);

/// Numbers of the layers (−1: outside of them) that have a norm which is not the base's, by names and shapes alone.
std::set<int64_t> layers_of_other_norms(const model::OpenedModel& candidate, const model::OpenedModel& base);

}  // namespace w4q::verify
