// Memory in which linears are multiplied, for tests of kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "device/buffer.h"
#include "gpu.h"
#include "kernels/linear/device_linear.h"

namespace w4q::test {

class TestWorkspace {
 public:
  TestWorkspace(const kernels::WorkspaceSizes& sizes, const device::Stream& stream)
      : sizes_{std::max<size_t>(sizes.semaphores, 256), std::max<size_t>(sizes.scratch, 256)},
        semaphores_(test::gpu(), sizes_.semaphores),
        scratch_(test::gpu(), sizes_.scratch) {
    semaphores_.fill(0, stream);
    scratch_.fill(0xFF, stream);
  }
  /// For 1 to `rows` rows of `linear`.
  TestWorkspace(const kernels::DeviceLinear& linear, int64_t rows, const device::Stream& stream, bool int8 = false)
      : TestWorkspace(kernels::workspace_sizes(test::gpu().properties(), linear, plan(linear, int8), rows), stream) {}

  static kernels::LaunchPlan plan(const kernels::DeviceLinear& linear, bool int8 = false) {
    return kernels::plan_launches(test::gpu().properties(), linear, int8);
  }
  kernels::Workspace get() { return {semaphores_.data(), scratch_.data(), sizes_}; }

  bool left_semaphores_empty(const device::Stream& stream) {
    std::vector<std::byte> words(semaphores_.size());
    semaphores_.download(words, stream);
    stream.synchronize();
    return std::ranges::all_of(words, [](std::byte byte) { return byte == std::byte{0}; });
  }

 private:
  kernels::WorkspaceSizes sizes_;
  device::DeviceBuffer semaphores_, scratch_;
};

}  // namespace w4q::test
