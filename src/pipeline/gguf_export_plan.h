// What becomes of every tensor of a checkpoint on its way into a GGUF file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/ggml_type.h"
#include "formats/gguf_forms.h"
#include "io/gguf.h"
#include "model/model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_targets.h"

namespace w4q::pipeline {

struct ExportedTensor {
  std::string name;  ///< in the GGUF file
  model::Parameter parameter;
  const checkpoint::PackedLinearInfo* packed = nullptr;  ///< points into ExportPlan::model
  GgmlType type = GgmlType::f32;
  bool keeps_codes = false;  ///< blocks are made of the integer planes themselves
  /// Scales are searched; null: values are stored as they are, or by the reference's rule.
  const formats::GgufForm* form = nullptr;
  bool rotary = false;  ///< rows take the order of the architecture "llama"

  /// A matrix of several that are one tensor: the experts of a layer, which follow each other.
  bool is_part() const noexcept { return parameter.gguf_part >= 0; }
};

struct ExportPlan {
  model::OpenedModel model;
  std::vector<ExportedTensor> tensors = {};
  std::vector<float> rope_factors = {};
  io::GgufMetadata metadata = {};
  std::vector<std::string> notes = {};
  std::unique_ptr<GgufCalibration> calibration = {};  ///< where types were chosen with it
};

/// Opens the checkpoint and decides everything. The plan stays where it is: parts of it point at others. Throws as
/// export_gguf does.
std::unique_ptr<ExportPlan> plan_export(const GgufExportRequest& request);

/// The tensors of the file: parts together make one.
std::vector<io::PlannedGgufTensor> planned_tensors(const ExportPlan& plan);
io::PlannedGgufTensor rope_factors_plan(const ExportPlan& plan);

/// Bytes of a tensor in the checkpoint, and in a GGUF file.
int64_t stored_bytes(const ExportPlan& plan, const ExportedTensor& tensor);
int64_t gguf_bytes(GgmlType type, const Shape& shape);

}  // namespace w4q::pipeline
