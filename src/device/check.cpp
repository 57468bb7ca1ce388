#include "device/check.h"

#include "core/error.h"
#include "core/text.h"

namespace w4q::device {

void check(cudaError_t status, std::string_view doing) {
  if (status == cudaSuccess) return;
  Error error(ErrorCode::device, concat(doing, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status)));
  cudaGetLastError();  // reported here: a later launch must not report it again
  if (status == cudaErrorMemoryAllocation) error.hint("free GPU memory, or use --device cpu");
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    error.hint("this program was built without kernels for this GPU: `w4q doctor` tells for which it was");
  }
  throw error;
}

void check_launch(std::string_view kernel, std::string_view shape) {
  check(cudaGetLastError(), concat("kernel ", kernel, " (", shape, ")"));
}

}  // namespace w4q::device
