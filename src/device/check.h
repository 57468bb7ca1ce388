// Every call of the CUDA runtime goes through check(): a failure becomes one Error that names what was being done.
#pragma once

#include <cuda_runtime.h>

#include <string_view>

namespace w4q::device {

/// Throws device: "<doing>: <CUDA's name and sentence>". Out of memory has a hint of its own.
void check(cudaError_t status, std::string_view doing);

/// Call right after a launch: `kernel` and `shape` ("4096 × 14336, 1 row") name it in the message.
void check_launch(std::string_view kernel, std::string_view shape);

}  // namespace w4q::device
