// What the stored weights say of themselves, without a base and without digests (docs/verify.md): codes against the
// scales of their blocks, energies against those of the weights beside them, planes that stand twice.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/packed_checkpoint.h"
#include "model/opened.h"
#include "verify/report.h"
#include "verify/statistics/blocks.h"
#include "verify/statistics/energy.h"
#include "verify/statistics/profiles.h"

namespace w4q::verify {

struct StatisticsReport {
  std::vector<BlockSubject> passes;
  EnergyReport energy;
  std::vector<Place> places;
  std::vector<std::string> faults;    ///< beyond any doubt
  std::vector<std::string> warnings;  ///< unlike what models have, which proves nothing
};

/// What one packed linear says by itself.
struct MeasuredLinear {
  struct Plane {
    std::string what;
    std::string digest;  ///< empty: nothing that could not be the same by chance
  };
  std::string name;
  std::vector<Plane> planes;
  std::vector<BlockSubject> passes;
  std::optional<Energies> energies;
};

/// What packed linears say, so that whoever has them already need not load them again.
class StatisticsCollector {
 public:
  /// `candidate` must outlive this.
  explicit StatisticsCollector(const model::OpenedModel& candidate);
  ~StatisticsCollector();
  StatisticsCollector(StatisticsCollector&&) noexcept;

  /// Of one of the candidate's, in the canonical layout and validated. On any thread.
  MeasuredLinear measure(const checkpoint::PackedLinearInfo& info,
                         std::shared_ptr<const formats::PackedLinear> packed) const;
  void add(MeasuredLinear measured);
  /// Of all that were added, and what is kept. Once.
  StatisticsReport report();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Looks at every packed linear. Throws as loading does.
StatisticsReport check_statistics(const model::OpenedModel& candidate);

io::Json to_json(const StatisticsReport& report);

}  // namespace w4q::verify
