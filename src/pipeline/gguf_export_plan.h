// What becomes of every tensor of a checkpoint on its way into a GGUF file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/ggml_type.h"
#include "formats/gguf_forms.h"
#include "gguf/config.h"
#include "gguf/tensor_map.h"
#include "io/gguf.h"
#include "model/model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_targets.h"

namespace w4q::pipeline {

/// A parameter, or what of it one of several tensors of the file holds.
struct ExportedTensor {
  model::Parameter parameter;
  gguf::FilePart file;
  const checkpoint::PackedLinearInfo* packed = nullptr;  ///< points into ExportPlan::model
  GgmlType type = GgmlType::f32;
  bool keeps_codes = false;  ///< blocks are made of the integer planes themselves
  /// Scales are searched; null: values are stored as they are, or by the reference's rule.
  const formats::GgufForm* form = nullptr;

  const std::string& name() const noexcept { return file.name; }
  /// One of several that are one tensor: the experts of a layer, which follow each other.
  bool is_part() const noexcept { return file.part >= 0; }
  /// Whether it is the whole parameter, as it is.
  bool is_plain() const noexcept;
};

struct ExportPlan {
  model::OpenedModel model;
  std::vector<ExportedTensor> tensors = {};
  std::vector<gguf::RopeFactors> rope_factors = {};
  io::GgufMetadata metadata = {};
  std::vector<std::string> notes = {};
  std::unique_ptr<GgufCalibration> calibration = {};  ///< where types were chosen with it
};

/// Opens the checkpoint and decides everything. The plan stays where it is: parts of it point at others. Throws as
/// export_gguf does.
std::unique_ptr<ExportPlan> plan_export(const GgufExportRequest& request);

/// The tensors of the file: parts together make one.
std::vector<io::PlannedGgufTensor> planned_tensors(const ExportPlan& plan);

/// Bytes in the checkpoint of what a tensor holds, and in a GGUF file.
int64_t stored_bytes(const ExportPlan& plan, const ExportedTensor& tensor);
int64_t gguf_bytes(GgmlType type, const Shape& shape);

}  // namespace w4q::pipeline
