// Parallel loops over OpenMP that carry exceptions out.
#pragma once

#include <cstdint>
#include <functional>

namespace w4q {

/// Sets the threads that parallel loops use from now on; 0 means all cores that this process may run on.
void set_threads(int count);
int threads() noexcept;

/// Calls `body(begin, end)` for ranges of at most `grain` that cover [0, count) once each, on any thread in any order.
/// The first exception stops further ranges and is rethrown here. Inside another parallel loop it runs on the caller.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace w4q
