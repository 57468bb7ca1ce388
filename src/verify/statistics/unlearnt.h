// Matrices that hold what they were initialised with: a loader that did not find a tensor makes one up, and saves it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "verify/statistics/energy.h"

namespace w4q::verify {

/// Each with its name; nothing where the relations of a model do not say that it was trained. `energies` by linear;
/// embeddings and head are measured here where they are stored as matrices.
std::vector<std::string> unlearnt_faults(const model::OpenedModel& model, const LayerGroups& groups,
                                         const EnergyReport& relations,
                                         const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
