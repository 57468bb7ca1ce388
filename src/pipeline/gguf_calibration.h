// What calibration knows of the matrices of a GGUF file: how much errors of each input channel count, and what errors of
// one channel are worth to the others.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gguf/tensor_map.h"
#include "io/partial.h"
#include "model/opened.h"
#include "pipeline/calibrated_model.h"
#include "quantize/error_factor.h"
#include "quantize/quantizer_registry.h"

namespace w4q::pipeline {

struct GgufCalibrationRequest {
  CalibratedRequest source;
  bool feedback = true;   ///< errors are fed back along k; otherwise they are weighed alone
  double damping = 0.01;  ///< of feedback
  bool windows = false;   ///< text is wanted, to measure mixes on
};

/// Matrices are asked for in model order: what the linears of one input share is made once.
class GgufCalibration {
 public:
  /// Calibrates where a text is given, with statistics in a hidden folder beside `output`. `model` must outlive it.
  /// Throws bad_argument when there is no or more than one source, or feedback without Gram matrices, and as the
  /// sources do.
  GgufCalibration(const GgufCalibrationRequest& request, const model::OpenedModel& model,
                  const std::filesystem::path& output);

  /// Of a linear by its module path, for blocks of so many weights, whose columns stand in this order. Valid until the
  /// next call; nothing for what is no linear of a layer.
  std::optional<quantize::CalibratedInput> input(std::string_view module, int64_t block, const gguf::Order& columns);
  const StatisticsFile& file() const noexcept { return *file_; }
  const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  void load(const model::LinearPlace& place, const gguf::Order& columns);

  const model::OpenedModel& model_;
  bool feedback_;
  double damping_;
  std::unique_ptr<io::Partial> folder_;  // of statistics that were made for this
  std::optional<StatisticsFile> file_;
  std::vector<std::string> notes_;
  int64_t layer_ = -1;
  LayerStatistics statistics_;
  std::string group_;  // whose inputs these are, and whether in another order than the model's:
  bool reordered_ = false;
  std::vector<float> mean_squares_, gram_;
  std::map<int64_t, quantize::ErrorFactor> factors_;  // by block
};

}  // namespace w4q::pipeline
