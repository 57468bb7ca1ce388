#include "device/launch.h"

namespace w4q::device {

void launch(const void* kernel, const LaunchShape& shape, void** parameters, const Stream& stream,
            std::string_view name) {
  const bool overlaps =
      stream.context().prepare(kernel, {static_cast<int>(shape.shared_bytes), shape.keep_apart, shape.overlap});
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream.get();
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  check(cudaLaunchKernelExC(&config, kernel, parameters), name);
}

}  // namespace w4q::device
