// The walk of calibration, shared by ranks: each decodes its part of the windows, and sums add up in the order of windows,
// so that they are those of one process, bit for bit.
//
// The sums of a layer travel from rank to rank: each adds its windows to those before them and hands them on, and goes on
// to the next layer. Rank r is r layers behind the first; in step t it decodes layer t − r. Ranks that no window is left
// for decode nothing. Behind the last of the others a layer is complete and goes to its owner. Owners wait for one another
// before they work on their layers, so that nobody waits for a rank that does.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "pipeline/calibrate.h"
#include "ranks/ranks.h"

namespace w4q::pipeline {

/// The text at every rank, read by the first.
CalibrationWindows read_windows(ranks::Ranks& ranks, const model::OpenedModel& model, const CalibrationText& text,
                                device::Context* gpu);

/// The part of the windows that a rank decodes, which is one piece of the text.
CalibrationWindows part_of(const CalibrationWindows& windows, int rank, int ranks);

class SharedWalk {
 public:
  /// `owners`: of each layer the rank that wants its sums; −1: none does. `together`: how many layers are complete before
  /// the first of them is worked on. More than one rank on the CPU and without pairs only.
  SharedWalk(ranks::Ranks& ranks, const model::OpenedModel& model, const CalibrationWindows& windows,
             const CalibrationOptions& options, std::vector<int> owners, int together);

  /// The sums of a layer that is this rank's; in their order. On a GPU Gram matrices stay there with `keep_gram`.
  LayerStatistics next(int64_t layer, bool keep_gram = false);
  /// Does this rank's part in the layers of others; called once it has all of its own.
  void finish();
  /// Null where this rank has no window to decode.
  Calibration* calibration() noexcept { return calibration_ ? &*calibration_ : nullptr; }

 private:
  int64_t last_step(int64_t layer) const noexcept { return layer + walkers_ - 1; }
  void step(bool keep_gram);
  void decode(int64_t layer, bool keep_gram);

  ranks::Ranks& ranks_;
  const model::ModelConfig& config_;
  const bool gram_;
  const int walkers_;  // ranks that decode: the first so many
  const std::vector<int> owners_;
  std::map<int64_t, int64_t> until_;  // for each wanted layer, the step behind which it is worked on
  std::optional<Calibration> calibration_;
  std::map<int64_t, LayerStatistics> complete_;  // this rank's
  int64_t step_ = 0, steps_ = 0;
};

}  // namespace w4q::pipeline
