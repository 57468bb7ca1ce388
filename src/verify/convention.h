// The convention detective: does somebody else's checkpoint hold what its config says? Shapes and data decide, not the
// config alone (docs/verify.md).
#pragma once

#include <filesystem>

#include "io/checkpoint.h"
#include "verify/report.h"

namespace w4q::verify {

/// True when the folder's config names a quantization that is not w4q's.
bool is_foreign_checkpoint(const std::filesystem::path& folder);

/// Audits a checkpoint of another program, every fault with its tensor and the evidence. `base`: the 16-bit model, with
/// the candidate's rotations folded in, or null. Throws bad_file where config.json itself cannot be read, and
/// unsupported for a dialect that is not known.
Check check_conventions(const io::Checkpoint& checkpoint, const io::Checkpoint* base);

}  // namespace w4q::verify
