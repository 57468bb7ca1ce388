// Calibration statistics in a safetensors file: per group of linears that share an input, named after the first of
// them, `<linear>.sum_abs` and `.sum_squares` F64 [k] and, where collected, `.gram` F32 [k(k+1)/2] (docs/awq.md); where
// measured, `<linear>.sensitivity` F64 [1] of each (sensitivity.h), which makes it version 2. A file of version 1 holds
// them as `sensitivity` F64 [layers, linears of a layer]. With `windows` I32 [samples, length], tokens on which mixes of
// widths can be measured (mix_meter.h), it is version 3.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/output.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "pipeline/linear_groups.h"
#include "pipeline/sensitivity.h"

namespace w4q::pipeline {

/// What a file says of where its sums come from.
struct StatisticsOrigin {
  std::string model;               ///< model_identity()
  int64_t tokens = 0;              ///< activation rows behind every sum
  std::vector<std::string> texts;  ///< hashes of the texts, in the order they were added
  std::string products;            ///< what multiplied while the texts were decoded; empty: it does not say
  bool gram = false;
  bool sensitivity = false;
  bool named_sensitivity = true;  ///< since version 2
  int64_t window_samples = 0;     ///< of the tokens that it keeps; 0: none
  int64_t window_length = 0;
};

/// 16 hex digits over the names, types and shapes of all tensors and the bytes of those with one dimension, and what
/// was done to derive them: models that differ in their norms, biases or folded rotations differ here.
std::string model_identity(const io::Checkpoint& checkpoint);

class StatisticsFile {
 public:
  /// Checks everything but the sums: names, types and shapes against `config`, the metadata. Throws bad_file.
  static StatisticsFile open(const std::filesystem::path& path, const model::ModelConfig& config);

  const StatisticsOrigin& origin() const noexcept { return origin_; }
  /// Throws mismatch when the file was not made from this model.
  void check_model(const std::string& identity) const;
  /// The sums of one layer. Throws bad_file naming the tensor when one is negative, not finite, or at odds with
  /// another.
  LayerStatistics load(int64_t layer) const;
  /// Empty where origin().sensitivity is not set. Throws bad_file when one is negative or not finite.
  Sensitivities load_sensitivities() const;
  /// Without samples where the file keeps none. Throws bad_file for an id outside the vocabulary.
  CalibrationWindows load_windows() const;

 private:
  StatisticsFile(std::string name, io::Checkpoint file, const model::ModelConfig& config);

  std::string name_;
  io::Checkpoint file_;
  const model::ModelConfig& config_;
  StatisticsOrigin origin_;
};

/// Writes a file layer by layer; it appears when it is complete.
class StatisticsWriter {
 public:
  /// Throws bad_argument when `path` exists and not `overwrite`, would replace one of `inputs` or a file in it, or does
  /// not end in .safetensors.
  StatisticsWriter(const std::filesystem::path& path, const model::ModelConfig& config, const StatisticsOrigin& origin,
                   bool overwrite, const std::vector<std::filesystem::path>& inputs);

  void write(int64_t layer, const LayerStatistics& statistics);
  void write(const Sensitivities& sensitivities);
  void write(const CalibrationWindows& windows);
  /// Returns the size of the file.
  int64_t finish();

 private:
  void write_tensor(const std::string& name, std::span<const std::byte> bytes);

  const model::ModelConfig& config_;
  io::SafetensorsHeader header_;
  io::OutputFile output_;
};

}  // namespace w4q::pipeline
