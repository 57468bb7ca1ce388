// The last step of a run: norms of the checkpoint that it has just written are distilled, and written anew.
#pragma once

#include "checkpoint/packed_checkpoint.h"
#include "io/checkpoint_writer.h"
#include "model/opened.h"
#include "pipeline/distill.h"

namespace w4q::pipeline {

struct DistilledOutput {
  std::vector<std::string> tuned;  ///< weights that others have taken the place of
  std::string note;                ///< for the report
};

/// All tensors are with `writer`, of what `quantization` says; norms that help take their place. `source` is the 16-bit
/// model. Throws as distill_norms.
DistilledOutput distill_output(const model::OpenedModel& source, const CalibrationWindows& windows,
                               const DistillOptions& options, const checkpoint::QuantizationConfig& quantization,
                               io::CheckpointWriter& writer);

}  // namespace w4q::pipeline
