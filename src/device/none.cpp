// Builds without CUDA: there is no GPU, and nobody gets a context.
#include "core/error.h"
#include "device/context.h"
#include "device/installation.h"

namespace w4q::device {

std::optional<Properties> find_gpu(std::string* why, int) {
  if (why != nullptr) *why = "this w4q was built without CUDA";
  return std::nullopt;
}

int gpu_count() noexcept { return 0; }

Installation find_installation() { return {}; }

Context::Context(int ordinal, int sharers) : ordinal_(ordinal), sharers_(sharers) {
  std::string why;
  find_gpu(&why, ordinal);
  throw Error(ErrorCode::device, "no GPU to use: " + why).hint("--device cpu does without");
}
Context::~Context() = default;

}  // namespace w4q::device
