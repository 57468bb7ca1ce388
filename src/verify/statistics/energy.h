// Energies of rows and columns against those of the weights beside them: channels that one linear writes and another
// reads, inputs that several read. Training leaves the two sizes related; whatever stands in another's place, or in
// another order, is not.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/linear/linear.h"
#include "verify/statistics/related_groups.h"

namespace w4q::verify {

/// Values that are kept as they are: of these rows those of these columns, both ascending.
struct KeptRange {
  std::vector<int64_t> rows, cols;
};
struct KeptValues {
  KeptRange range;
  std::vector<uint16_t> values;  ///< BF16, row by row
};

/// Logarithms of sums of squares, as decoded.
struct Energies {
  int64_t n = 0, k = 0;
  std::vector<int64_t> rows_taken;  ///< those that were decoded, ascending
  std::vector<double> rows;         ///< of those; −infinity: zeros alone
  std::vector<double> cols;         ///< over those rows
  double mean = 0;                  ///< log of the mean square of a weight
  KeptValues kept = {};
};

/// How much of a weight is decoded: all up to so many weights, of a larger one blocks of 16 rows spread evenly.
struct EnergySample {
  int64_t all_up_to = int64_t{1} << 22, taken = int64_t{1} << 21;
};

Energies energies_of(const kernels::LinearWeight& weight, const EnergySample& sample = {}, const KeptRange& keep = {});
/// The same of n × k weights whose rows `read` decodes.
Energies energies_of(int64_t n, int64_t k, const io::RowReader& read, const EnergySample& sample = {},
                     const KeptRange& keep = {});
/// The rows of a weight that are decoded, ascending.
std::vector<int64_t> taken_rows(int64_t n, int64_t k, const EnergySample& sample);

/// Which linears of `groups` are decoded, and how much of each: of experts less, and no more of them than 2^31 weights
/// together, each so manyth expert then.
std::map<std::string, EnergySample, std::less<>> energy_samples(const LayerGroups& groups);

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
    rotary,    ///< pairs of rows of queries and keys, which turn together
    stack,     ///< as channels, of ups that stand in one matrix with gates
  } by = Kind::inputs;
  Agreement found;
};

struct EnergyReport {
  std::vector<Relation> relations;
  std::vector<std::string> faults, warnings;
};

/// How rows stand in matrices that hold several things. `head_dim`: of heads whose pairs of rows the rotary embedding
/// turns; 0: not known, or norms stand between.
struct RowOrders {
  int64_t head_dim = 0;
  bool neighbours = false;  ///< rows 2i and 2i + 1 of a head turn together, not i and i + d/2
  bool in_turn = false;     ///< of gates and ups in one matrix: even and odd rows, not the two halves
};
RowOrders row_orders(const model::OpenedModel& model);

/// `energies` by linear. Only what stands in `groups` is looked at.
EnergyReport check_energies(const LayerGroups& groups, const RowOrders& orders,
                            const std::map<std::string, Energies, std::less<>>& energies);

}  // namespace w4q::verify
