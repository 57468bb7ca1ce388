// Where a weight stands among all others, by the sizes of its channels: what the same weight of the other layers has in
// common with those around it, it must have too (docs/verify.md).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/opened.h"
#include "verify/statistics/energy.h"

namespace w4q::verify {

/// One side of a weight: how far it is related to those around it as those of other layers are.
struct Place {
  std::string linear, side;  ///< "columns"
  int64_t layer = 0;
  double sigmas = 0;  ///< in standard errors of channels in any other order
  double others = 0;  ///< the least of the other layers
};

struct ProfileReport {
  std::vector<Place> places;
  std::map<std::string, std::string> faults;    ///< by linear
  std::map<std::string, std::string> warnings;  ///< by linear
};

/// What norms multiply by, by name: logarithms of magnitudes.
using NormSizes = std::map<std::string, std::vector<double>, std::less<>>;
NormSizes norm_sizes(const model::OpenedModel& model, const LayerGroups& groups);

/// Needs four layers that have a weight. Experts are not looked at.
ProfileReport check_profiles(const LayerGroups& groups, const std::map<std::string, Energies, std::less<>>& energies,
                             const NormSizes& norms);

}  // namespace w4q::verify
