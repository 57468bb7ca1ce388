#include "core/error.h"
#include "verify/products/kernel_check.h"

namespace w4q::verify {

KernelReport check_kernels(device::Context&, const model::Model&, bool, ranks::Ranks&, const model::LayerStage&) {
  throw Error(ErrorCode::device, "this program was built without CUDA");
}

KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations) {
  ranks::Ranks alone;
  return check_kernels(gpu, model, int8_activations, alone, {});
}

}  // namespace w4q::verify
