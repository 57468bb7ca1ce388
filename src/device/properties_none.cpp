#include "device/properties.h"

namespace w4q::device {

std::optional<Properties> find_gpu(std::string* why) {
  if (why != nullptr) *why = "this w4q was built without CUDA";
  return std::nullopt;
}

}  // namespace w4q::device
