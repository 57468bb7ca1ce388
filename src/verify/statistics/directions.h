// Which way rows and columns point in the residual stream: what a neuron's gate and its up read, and what its down writes,
// point along or against each other; so do a query's row and its key's, a value's and the column that reads it. Unlike
// sizes, directions are what they were whatever scales were folded into a model.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "verify/statistics/energy.h"
#include "verify/statistics/related_groups.h"

namespace w4q::verify {

/// Which values of each linear of `groups` are kept when it is decoded: of what reads and writes one stream the same
/// channels of it, some 100 KB a linear, of experts less, so that all of a model have at most 2^26 values.
std::map<std::string, KeptRange, std::less<>> values_to_keep(
    const LayerGroups& groups, const std::map<std::string, EnergySample, std::less<>>& samples);

/// What is wrong, by linear: what follows its name. `energies` by linear, with the values that were kept of them.
std::map<std::string, std::string> misdirected(const model::OpenedModel& model, const LayerGroups& groups,
                                               const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
