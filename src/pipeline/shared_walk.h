// The walk of calibration, shared by ranks, with the sums of one process, bit for bit.
//
// On the CPU each rank decodes its part of the windows. The sums of a layer travel from rank to rank: each adds its
// windows to those before them and hands them on, and goes on to the next layer. Rank r is r layers behind the first; in
// step t it decodes layer t − r. Ranks that no window is left for decode nothing. Behind the last of the others a layer
// is complete and goes to its owner. Owners wait for one another before they work on their layers, so that nobody waits
// for a rank that does.
//
// On GPUs, which make sums faster than sums can travel, each rank runs other layers over all windows, whose hidden
// states travel instead (layer_turns.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "pipeline/calibrate.h"
#include "pipeline/exchange_cuda.h"
#include "pipeline/layer_turns.h"
#include "ranks/ranks.h"

namespace w4q::pipeline {

/// The text at every rank, read by the first.
CalibrationWindows read_windows(ranks::Ranks& ranks, const model::OpenedModel& model, const CalibrationText& text,
                                device::Context* gpu);

/// The part of the windows that a rank decodes, which is one piece of the text.
CalibrationWindows part_of(const CalibrationWindows& windows, int rank, int ranks);

/// Bytes that a rank needs beyond what one process does, for sums on their way: those that came, those that leave, and
/// those that wait to be worked on. On a GPU none travel.
int64_t travelling_memory(const model::ModelConfig& config, const CalibrationOptions& options, int ranks);

class SharedWalk {
 public:
  /// `owners`: of each layer the rank that wants its sums; −1: none does. `together`: how many layers are complete before
  /// the first of them is worked on; on GPUs a round is. More than one rank without pairs only.
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
  LayerStatistics next_turn(int64_t layer, bool keep_gram);
  void take_turn(bool keep_gram);

  ranks::Ranks& ranks_;
  const model::ModelConfig& config_;
  const bool gram_;
  const int walkers_;  // ranks that decode: the first so many
  const std::vector<int> owners_;
  std::map<int64_t, int64_t> until_;        // for each wanted layer, the step behind which it is worked on
  std::unique_ptr<ExchangeCuda> exchange_;  // of several GPUs
  std::optional<LayerTurns> turns_;         // on GPUs
  int64_t round_ = 0;                       // the next one
  std::optional<Calibration> calibration_;
  std::map<int64_t, LayerStatistics> complete_;  // this rank's
  int64_t step_ = 0, steps_ = 0;
};

}  // namespace w4q::pipeline
