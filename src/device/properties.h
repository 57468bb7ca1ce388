// The GPU of this machine, as far as w4q needs to know it. Compiled with and without CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace w4q::device {

struct Properties {
  std::string name;
  int sm = 0;  ///< compute capability, 89 for an RTX 4090
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes_per_block = 0;  ///< with opt-in
};

/// The current GPU; nothing, with the reason in `why`, when there is none, its driver is too old, or this program was
/// built without CUDA.
std::optional<Properties> find_gpu(std::string* why = nullptr);

}  // namespace w4q::device
