// Hidden states on their way between the GPUs of ranks: by NCCL where all ranks can load it and no two share a GPU, by
// host memory and the ranks' own messages elsewhere. Compiled with and without CUDA.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ranks/ranks.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

class ExchangeCuda {
 public:
  /// By all ranks together. `ranks` and `work` must outlive it.
  ExchangeCuda(ranks::Ranks& ranks, quantize::CudaWork& work);
  ~ExchangeCuda();
  ExchangeCuda(const ExchangeCuda&) = delete;
  ExchangeCuda& operator=(const ExchangeCuda&) = delete;

  /// GPU memory, and whose it becomes or was.
  struct Part {
    int rank = 0;
    float* data = nullptr;
    size_t bytes = 0;
  };
  /// Sends and receives behind what is queued on the stream of the work, all at once, and waits for it. Whoever is
  /// received from sends to this rank in the same step. Throws Stopped, Interrupted, device.
  void exchange(std::span<const Part> sent, const std::optional<Part>& received);
  /// "NCCL 2.28.9", or "host memory" and why.
  const std::string& way() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
