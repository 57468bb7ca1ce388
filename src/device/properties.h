// The GPUs of this machine, as far as w4q needs to know them. Compiled with and without CUDA.
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
  int64_t shared_bytes_per_block_optin = 0;
  int64_t shared_bytes_per_multiprocessor = 0;
};

/// GPU `ordinal`; nothing, with the reason in `why`, when there is none of this number, it or its driver is too old, or
/// this program was built without CUDA.
std::optional<Properties> find_gpu(std::string* why = nullptr, int ordinal = 0);

/// How many GPUs this machine shows to the process; 0 where there are none, or none can be used.
int gpu_count() noexcept;

}  // namespace w4q::device
