// Choosing the next token on the GPU: the twin of sampling.h. Greedy is exact: the largest logit, the lowest id on
// ties. Drawing follows the same definition (temperature, top-k, top-p, min-p, then a walk from the likeliest token
// on); probabilities are counted in units of 2^-40 of the likeliest one's, so that sums are exact and the token does
// not depend on their order, and fp32 exponentials may differ from the CPU's in the last bits (class E3).
//
// The largest logit is found by many blocks; what follows is the work of the one that is done last: a row of 128 K logits is
// 0.5 MB in the L2 cache, read up to 17 times more for everything at once.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/sampling/sampling.h"

namespace w4q::kernels {

/// Where a sequence stands, in GPU memory: what a replayed step reads and moves on.
struct StepState {
  int32_t position = 0;  ///< of the token that is decoded next
  int32_t token = 0;     ///< its id
  uint64_t draw = 0;     ///< tokens drawn so far: the next draw's number
  /// What the blocks of a draw have found so far, and how many are done; zero between draws.
  unsigned long long best = 0;
  uint32_t done = 0;
};

/// Draws a token from the one row of `logits`, puts it into `state` (and moves the position and the number of draws on)
/// and into history[draw mod capacity], which gets −1 where the largest logit is not finite. Options have been checked
/// (check_sampling).
struct SampleArgs {
  const float* logits = nullptr;  ///< [vocab]
  int64_t vocab = 0;
  SamplingOptions options;
  StepState* state = nullptr;
  int32_t* history = nullptr;  ///< may be pinned memory of the host
  int64_t history_capacity = 0;
  bool overlap = false;  ///< elementwise_cuda.h
};
void sample_cuda(const SampleArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
