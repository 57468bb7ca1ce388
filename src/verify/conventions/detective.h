// The convention detective: does somebody else's checkpoint hold what its config says? Shapes and data decide, not the
// config alone (docs/verify.md).
#pragma once

#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "verify/report.h"

namespace w4q::verify {

/// Audits a checkpoint of another program, every fault with its tensor and the evidence; `candidate.quantization` is not
/// looked at, and what is odd and no fault goes to `notes`. `base`: the 16-bit model, with the candidate's rotations folded in, or null. Throws bad_file where
/// config.json itself cannot be read, and unsupported for a dialect that is not known.
Check check_conventions(const checkpoint::Folder& candidate, const io::Checkpoint* base,
                        std::vector<std::string>* notes = nullptr);

}  // namespace w4q::verify
