// What mixes of widths do to a model's predictions, measured: KL to the 16-bit model on some windows of text. Layers
// before the first one that changed are not run again (docs/quality.md).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/decoder_layer.h"
#include "model/model.h"
#include "pipeline/calibrate.h"
#include "pipeline/divergence.h"
#include "pipeline/width_store.h"
#include "ranks/ranks.h"

namespace w4q::pipeline {

/// A linear whose width is open, or several of one width: the experts that one tensor holds.
struct MixItem {
  std::string module;
  int64_t layer = 0;
  size_t first = 0;                      ///< choice c is the store's first + c
  size_t widths = 0;                     ///< so many lie in the store; `widths` itself is 16 bit …
  bool sixteen = false;                  ///< … and open to choice
  std::vector<std::string> others = {};  ///< linears of the same layer that go with `module`

  size_t choices() const noexcept { return widths + (sixteen ? 1 : 0); }
};

/// The choice of each item, by its index.
using Mix = std::vector<size_t>;

/// Windows that are enough for it, spread evenly over those of the calibration: 8 of at most 256 tokens.
CalibrationWindows mix_windows(const CalibrationWindows& windows);

/// Whether mixes of this model can be measured: it is one that w4q decodes.
bool can_measure_mixes(const model::ModelConfig& config);

/// Runs on the CPU, and holds one layer's weights in fp32 and hidden states [tokens, hidden] of all layers, twice; of layers
/// whose keys and values later ones read these, twice, and what layers add of their own. All ranks make the same calls and
/// get the same numbers: they share effects, and each measures mixes by itself.
class MixMeter {
 public:
  /// Everything must outlive it. Items stand in model order; `on_run` is called after each run of a layer over all
  /// windows.
  MixMeter(const model::OpenedModel& model, const CalibrationWindows& windows, const std::vector<MixItem>& items,
           const WidthStore& store, std::function<void()> on_run = {}, ranks::Ranks* ranks = &ranks::world());

  /// Nats per token. Goes on from what the mix that was accepted last has in common with this one. Throws bad_file
  /// where predictions are not finite.
  double measure(const Mix& mix);
  /// The mix that was measured last is the one that others are compared with.
  void accept();
  const Mix& accepted() const noexcept { return accepted_; }

  /// Of every choice of every item nats per token with that choice alone changed in the accepted mix; its own has the
  /// mix's. As many streams of hidden states as fit into 1 GiB, at least one, go through the layers at once; one where
  /// layers read others' keys.
  std::vector<std::vector<double>> effects();
  /// Bytes that it takes, effects() included.
  static int64_t memory(const model::OpenedModel& model, const CalibrationWindows& windows);
  /// Of effects(), runs of a layer over all windows.
  static int64_t effect_runs(const model::ModelConfig& config, const std::vector<MixItem>& items);

 private:
  using Stream = std::vector<float>;  // hidden states of all windows
  struct Change {
    size_t item = 0, choice = 0;
    int rank = 0;
  };

  int64_t tokens() const noexcept { return windows_.samples * windows_.length; }
  model::LayerWeights load(int64_t layer, const Mix& mix) const;
  void exchange(const MixItem& item, size_t choice, const model::LayerWeights& plain,
                model::LayerWeights& weights) const;
  void embed();
  model::LayerMemory memory(int64_t layer, int64_t window, int64_t from);
  /// Of a walk that began with layer `from`.
  void run(const model::LayerWeights& weights, int64_t layer, int64_t from, Stream& stream);
  std::vector<double> per_token(std::span<const Stream* const> streams) const;
  int64_t first_difference(const Mix& mix) const;
  std::vector<Change> changes() const;
  std::vector<double> divergences(int64_t layer, std::span<const Change> changes);

  const model::OpenedModel& model_;
  const model::ModelConfig& config_;
  const CalibrationWindows& windows_;
  const std::vector<MixItem>& items_;
  const WidthStore& store_;
  const std::function<void()> on_run_;
  ranks::Ranks& ranks_;
  const DivergenceMeter meter_;
  model::LayerDecoder decoder_;
  model::WalkMemories memories_, tried_memories_;     // of the accepted mix, and of the walk that was made last
  std::vector<Stream> own_;                           // of each window what its layers add of their own
  std::map<std::string, size_t, std::less<>> index_;  // of items by module
  Stream expected_;                                   // behind the last layer of the 16-bit model
  std::vector<Stream> states_, tried_;                // before each layer, and behind the last one
  Mix accepted_, measured_;
  int64_t tried_from_ = 0;  // states of the mix measured last from this layer on are in tried_
  double divergence_ = 0;   // of the mix measured last
  double accepted_divergence_ = 0;
};

}  // namespace w4q::pipeline
