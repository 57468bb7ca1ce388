// The first rungs of verification: is every parameter there, of the right size, and are the packed bits sound?
#pragma once

#include "checkpoint/packed_checkpoint.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "model/config.h"
#include "verify/report.h"

namespace w4q::verify {

/// A checkpoint opened as far as its headers.
struct OpenCheckpoint {
  std::filesystem::path folder;
  io::Json config;
  model::ModelConfig model;
  checkpoint::QuantizationConfig quantization;
  io::Checkpoint checkpoint;
};

/// Throws bad_file or unsupported when config or headers cannot be read at all.
/// Its residual passes are left out unless `residual`.
OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, bool residual = true);

/// The model that a candidate was made from, with the rotations that the candidate has folded in folded into it too.
OpenCheckpoint open_base(const std::filesystem::path& folder, const OpenCheckpoint& candidate);

/// Every parameter of the architecture is stored once, in 16 bit or packed, with the right type and shape; nothing is
/// missing, nothing extra. With `base`: its config is the same but for the quantization, every tensor of it is
/// accounted for, and what was kept has the same bytes.
Check check_structure(const OpenCheckpoint& candidate, const OpenCheckpoint* base);

/// Every packed linear unpacks to sound canonical planes (padding zero, codebook ascending, scales in range), and
/// packing those again gives the stored bytes.
Check check_codes(const OpenCheckpoint& candidate);

/// Every 16-bit tensor of the architecture is finite.
Check check_finite(const OpenCheckpoint& candidate);

}  // namespace w4q::verify
