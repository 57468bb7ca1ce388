// The GPU that tests run on: the first one.
#pragma once

#include "device/context.h"

namespace w4q::test {

/// For tests that have made sure of one. It lives until the program ends, as contexts must not be freed after the
/// driver.
inline device::Context& gpu() {
  static auto* const context = new device::Context(0);
  return *context;
}

}  // namespace w4q::test
