// What needs calibration over a whole model: brings the statistics of each layer, from a file or by calibrating now, to
// calibrated_layer.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/context.h"
#include "io/json.h"
#include "model/kinds.h"
#include "model/opened.h"
#include "pipeline/calibrate.h"
#include "pipeline/calibrated_layer.h"
#include "pipeline/gradients.h"
#include "pipeline/shared_walk.h"
#include "pipeline/statistics_file.h"

namespace w4q::pipeline {

struct CalibratedRequest {
  CalibrationText text;              ///< calibrate with this text now …
  std::filesystem::path statistics;  ///< … or take this file; one of the two, both where a step reads the text anew
  int64_t max_memory = 0;            ///< as in CalibrationOptions
  std::shared_ptr<device::Context> gpu =
      {};  ///< where layers run and linears are searched and packed; null: on the CPU
};

/// Which rank quantizes each layer; −1: none has to.
struct LayerOwners {
  ranks::Ranks* ranks = &ranks::world();
  std::vector<int> of;
};

/// Goes through the layers in order.
class CalibratedRun {
 public:
  /// `model` must outlive it; `output` is where the quantized model will stand. Throws bad_argument
  /// when there is no or more than one source, mismatch where ranks differ, and as the sources do. Text is decoded by all ranks together, which must
  /// multiply alike; where a layer's inputs are those behind quantized layers (asym), by each of them.
  CalibratedRun(const CalibratedRequest& request, const model::OpenedModel& model, CalibratedPacking packing,
                const std::filesystem::path& output, LayerOwners owners);
  ~CalibratedRun();

  /// A layer of this rank; they come in order.
  CalibratedLayer layer(int64_t index);
  /// Does this rank's part for the layers of others, when it has had its own. What layers took, in memory, on the GPU and
  /// on disk, is given back for what comes behind them.
  void finish();
  /// What the user should know about the calibration.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// The text that was decoded; empty where statistics stood in for it.
  const CalibrationWindows& windows() const noexcept { return windows_; }
  /// Where layers ran; null: on the CPU.
  const std::shared_ptr<quantize::CudaWork>& gpu() const noexcept { return gpu_; }
  /// What multiplied while the text was decoded, on whose last bits near ties depend; empty where that is not known.
  const std::string& products() const noexcept { return products_; }

 private:
  CalibratedLayer next();
  bool in_pairs() const noexcept { return packing_.options.steps.has(quantize::StepKind::asymmetric); }
  void read_text(const CalibratedRequest& request, const std::filesystem::path& output);
  void walk_back(CalibrationOptions& options);

  const model::OpenedModel& model_;
  const CalibratedPacking packing_;
  std::shared_ptr<quantize::CudaWork> gpu_;  // null on the CPU
  std::optional<StatisticsFile> file_;       // whose statistics are taken where it is there
  const LayerOwners owners_;
  ranks::Ranks alone_;
  std::optional<SharedWalk> walk_;    // where text is decoded
  std::optional<OutputCosts> costs_;  // where errors are fed back along both sides
  CalibrationWindows windows_;
  std::vector<std::string> notes_;
  std::string products_;
  int64_t layer_ = 0;
};

/// What the user should know of the experts of all layers; empty: nothing.
std::string describe(const ExpertCounts& experts);

/// Throws bad_argument when there is not what steps ask for: text, or statistics instead of it where they serve.
void check_calibration(const CalibratedRequest& request, const quantize::Steps& steps);

/// Linears whose scales will be stored rather than folded.
std::vector<std::string> linears_with_input_scale(const model::ModelConfig& config, const SchemeOf& scheme_of,
                                                  const quantize::Steps& steps);

/// The table of groups: which α won, and the error of the outputs.
std::string to_text(const std::vector<GroupReport>& groups, model::Detail detail = model::Detail::kinds);
io::Json to_json(const std::vector<GroupReport>& groups);

}  // namespace w4q::pipeline
