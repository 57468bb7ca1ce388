// Norms by distillation: the weights of a quantized model's norms are moved until it predicts more like the 16-bit model
// on calibration text. Codes and scales stay (docs/quality.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/opened.h"
#include "pipeline/calibrate.h"

namespace w4q::pipeline {

struct DistillOptions {
  int64_t steps = 150;
  int64_t samples = 2;     ///< sequences of a step …
  int64_t length = 512;    ///< … of at most so many tokens: windows are cut
  double rate = 2e-3;      ///< of Adam, falling to nothing along a cosine
  uint64_t seed = 0;       ///< of the order of the sequences
  int64_t max_memory = 0;  ///< as in CalibrationOptions
  std::filesystem::path spill_at = {};
  std::shared_ptr<quantize::CudaWork> gpu = {};  ///< where it has a way for all layers; null: on the CPU
};

/// What came of it.
struct DistilledNorms {
  std::map<std::string, std::vector<float>> weights;  ///< as they are to be stored, by the norm's module path
  int64_t held_out = 0;                               ///< sequences that it was not done with …
  double before = 0, after = 0;                       ///< … and their KL to the 16-bit model, nats per token
  int64_t steps = 0;

  /// Weights that do not help where they were not made are not given.
  bool helps() const noexcept { return after < before; }
};

/// Every norm of the residual stream and of heads; those inside mixtures stay. `base` is 16-bit, `quantized` its packed
/// version. On the CPU it does not depend on the number of threads. Throws unsupported as
/// model::require_gradients, bad_argument when max_memory is not enough.
DistilledNorms distill_norms(const model::OpenedModel& base, const model::OpenedModel& quantized,
                             const CalibrationWindows& windows, const DistillOptions& options);

/// Throws bad_argument where options.max_memory is not enough for windows of `length` tokens: before anything is packed.
void require_distill_memory(const model::OpenedModel& base, int64_t length, const DistillOptions& options);
/// Bytes that it takes, the packed model included.
int64_t distill_memory(const model::OpenedModel& base, int64_t packed_bytes, int64_t samples, int64_t length,
                       const DistillOptions& options = {});

}  // namespace w4q::pipeline
