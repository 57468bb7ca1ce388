// Makes a file of calibration statistics: from text, from files made before, or from both.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/json.h"
#include "pipeline/calibrate.h"
#include "ranks/ranks.h"

namespace w4q::pipeline {

struct CalibrateRequest {
  std::filesystem::path model;
  std::filesystem::path output;              ///< ends in .safetensors
  CalibrationText text;                      ///< empty: only merge
  CalibrationOptions options;                ///< spill_at and on_window are set here
  std::optional<uint64_t> fold;              ///< of the model with rotations of this seed folded in
  bool sensitivity = false;                  ///< measure sensitivities too, or take those of the first merged file
  bool windows = false;                      ///< keep tokens to measure mixes of widths on; with `sensitivity` anyway
  std::vector<std::filesystem::path> merge;  ///< statistics of the same model, to be added
  bool overwrite = false;
  ranks::Ranks* ranks =
      &ranks::world();  ///< share the windows, or the layers on GPUs; the first one reports and writes the file
};

struct CalibrateReport {
  int64_t tokens = 0;   ///< of all statistics in the file
  int64_t samples = 0;  ///< windows that were decoded now
  int64_t layers = 0;
  int64_t spilled = 0;  ///< windows that lay on disk between layers
  int64_t file_bytes = 0;
  double seconds = 0;
  std::vector<std::string> notes;
};

/// Throws bad_file, bad_argument, mismatch (statistics of another model, or with and without Gram matrices).
CalibrateReport calibrate_model(const CalibrateRequest& request);
/// The same of a model that is open already, folded or not: `request.fold` is not looked at.
CalibrateReport calibrate_model(const CalibrateRequest& request, const model::OpenedModel& model);

std::string to_text(const CalibrateReport& report);
io::Json to_json(const CalibrateReport& report);

}  // namespace w4q::pipeline
