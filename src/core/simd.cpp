#include "core/simd.h"

#include <hwy/highway.h>
#include <hwy/targets.h>

#include <bit>
#include <cstdint>

namespace w4q {

std::vector<std::string> simd_targets() {
  // The lower the bit, the better the target.
  std::vector<std::string> names;
  for (auto left = static_cast<uint64_t>(hwy::SupportedTargets() & HWY_TARGETS); left != 0; left &= left - 1) {
    names.emplace_back(hwy::TargetName(static_cast<int64_t>(left & -left)));
  }
  return names;
}

}  // namespace w4q
