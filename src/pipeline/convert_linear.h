// One packed linear from one dialect to another, and the proof that it is the same.
#pragma once

#include <string>

#include "checkpoint/packed_checkpoint.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "pipeline/convert_model.h"

namespace w4q::pipeline {

/// A linear before and after.
struct LinearPlan {
  const checkpoint::PackedLinearInfo* from = nullptr;
  checkpoint::PackedLinearInfo to;  ///< of a dialect, or w4q's own
  int64_t first_row = 0;            ///< of the source, of which `to` may be a part
  std::string loses;                ///< why the codes cannot be kept, as far as the structure tells; empty: they can
};

/// Reads the linear, writes its tensors, decodes once more what was written, and fills proof, error and `loses` of
/// `linear`. Thread-safe for different linears. Throws unsupported when a value has no place and `allow_lossy` is
/// false.
void convert_linear(const io::Checkpoint& checkpoint, const LinearPlan& plan, bool allow_lossy,
                    io::CheckpointWriter& writer, ConvertedLinear& linear);

}  // namespace w4q::pipeline
