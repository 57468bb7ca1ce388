// Energies of rows and columns against those of the weights beside them: channels that one linear writes and another
// reads, inputs that several read. Training leaves the two sizes related; whatever stands in another's place, or in
// another order, is not.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/linear/linear.h"
#include "model/config.h"
#include "model/layer_plan.h"

namespace w4q::verify {

/// Logarithms of sums of squares, as decoded.
struct Energies {
  int64_t n = 0, k = 0;
  std::vector<int64_t> rows_taken;  ///< those that were decoded, ascending
  std::vector<double> rows;         ///< of those; −infinity: zeros alone
  std::vector<double> cols;         ///< over those rows
  double mean = 0;                  ///< log of the mean square of a weight
};

/// Of all rows up to 2^22 weights, of a larger one blocks of 16 rows spread evenly, 2^21 weights together.
Energies energies_of(const kernels::LinearWeight& weight);
/// The same of n × k weights whose rows `read` decodes.
Energies energies_of(int64_t n, int64_t k, const io::RowReader& read);

/// How far two series agree: the rank correlation of what is left of each when means of 16 neighbours are taken out, so
/// that neither sizes of heads nor single loud channels speak.
struct Agreement {
  double value = 0;
  double count = 0;

  /// In standard errors of series that have nothing to do with each other.
  double sigmas() const noexcept;
};
Agreement agreement(std::span<const double> a, std::span<const double> b);

/// What was measured between two weights, for reports.
struct Relation {
  int64_t layer = 0;
  std::string kind;  ///< "v_proj rows, o_proj columns"
  std::string a, b;  ///< the two linears
  enum class Kind {
    inputs,    ///< both read the same
    channels,  ///< one writes what the other reads
    gate,      ///< the same, or beside it, by way of a gate
  } by = Kind::inputs;
  Agreement found;
};

struct EnergyReport {
  std::vector<Relation> relations;
  std::vector<std::string> faults, warnings;
};

/// `energies` by linear. Only what stands in the layers of `config` is looked at.
EnergyReport check_energies(const model::ModelConfig& config,
                            const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
