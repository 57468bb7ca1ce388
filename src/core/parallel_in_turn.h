// Whole pieces of work on all threads.
#pragma once

#include <cstdint>
#include <functional>

namespace w4q {

/// Calls `body(i)` for every i of [0, count), which threads take up in their order: whole pieces of work, in which loops
/// run on their caller. Of several exceptions the one of the least i comes out, whatever the threads; what was taken up
/// before it is finished, what was not is left out.
void parallel_in_turn(int64_t count, const std::function<void(int64_t i)>& body);

}  // namespace w4q
