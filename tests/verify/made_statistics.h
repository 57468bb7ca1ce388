// What the statistics of a made checkpoint say.
#pragma once

#include "core/progress.h"
#include "made_checkpoint.h"
#include "support.h"
#include "verify/statistics/statistics.h"

namespace w4q::verify {

/// Of a folder that is written for it; of mixtures each expert for itself, as verify takes them.
inline StatisticsReport statistics_of(const test::MadeCheckpoint& made) {
  set_progress_enabled(false);
  const test::TemporaryFolder folder;
  made.write(folder / "made");
  const auto model = model::take_apart(model::open_model(folder / "made"));
  return StatisticsCollector(model).report();
}

inline std::vector<std::string> statistics_faults(const test::MadeCheckpoint& made) {
  return statistics_of(made).faults;
}

}  // namespace w4q::verify
