// The experts of a mixture together: whether what reads stands in the order of what writes, and how stacks lie in memory.
#pragma once

#include <map>
#include <string>

#include "verify/statistics/energy.h"

namespace w4q::verify {

/// Whether gates and ups take turns in stacks of both, by which way ups agree better with what reads them; for models whose
/// architecture does not say it. Where there is no such stack, false.
bool gates_take_turns(const LayerGroups& groups, const std::map<std::string, Energies, std::less<>>& energies);

/// What reads the experts of a mixture in another order than they are written in, and stacks whose bytes lie otherwise than
/// their shapes say: name → what is wrong. `energies` by linear.
std::map<std::string, std::string> misplaced_experts(const model::OpenedModel& model, const LayerGroups& groups,
                                                     const RowOrders& orders,
                                                     const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
