// Gated delta nets: what decays and convolves, and channels that one of their linears writes and another reads.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "verify/statistics/energy.h"

namespace w4q::verify {

/// Each with its name, of architectures that are known. `energies` by linear. Throws as loading does.
std::vector<std::string> delta_faults(const model::OpenedModel& model,
                                      const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
