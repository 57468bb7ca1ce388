// Whether what reads a norm carries the factors that the norm gave away: another model's norm is positive, too.
#pragma once

#include <string>
#include <vector>

#include "model/opened.h"

namespace w4q::verify {

/// One line for each norm that is neither the base's nor what is left of it behind the factors of its readers' columns.
/// Throws as loading does.
std::vector<std::string> norms_not_carried(const model::OpenedModel& candidate, const model::OpenedModel& base);

}  // namespace w4q::verify
