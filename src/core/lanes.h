// Tasks side by side in threads of their own: for a few long ones that mostly wait, each of which may run parallel loops.
#pragma once

#include <cstddef>
#include <functional>

namespace w4q {

/// Calls task(lane, index) for 0 … count − 1, in order as `lanes` threads become free; the caller is lane 0. The first
/// exception keeps further tasks from beginning and is rethrown here once the others have ended.
void run_lanes(size_t lanes, size_t count, const std::function<void(size_t lane, size_t index)>& task);

}  // namespace w4q
