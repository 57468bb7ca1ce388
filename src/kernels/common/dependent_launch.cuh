// Launches that may begin while the launch before them in the stream still runs (programmatic dependent launch, sm_90).
#pragma once

#include <string_view>

#include "device/launch.h"
#include "kernels/common/grid.h"

namespace w4q::kernels {

using device::LaunchShape;

/// Launches `kernel` on the stream's GPU, set up there as the shape needs it.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, const device::Stream& stream, std::string_view name,
            const Args&... args) {
  const auto with = [&](Params... params) {
    void* pointers[] = {&params...};
    device::launch(reinterpret_cast<const void*>(kernel), shape, pointers, stream, name);
  };
  with(args...);
}
template <auto kernel, class... Args>
void launch(const LaunchShape& shape, const device::Stream& stream, std::string_view name, const Args&... args) {
  launch(kernel, shape, stream, name, args...);
}

}  // namespace w4q::kernels
