// Parallel loops over OpenMP that carry exceptions out.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

namespace w4q {

/// Sets the threads that parallel loops use from now on; 0 means all cores that this process may run on.
void set_threads(int count);
int threads() noexcept;

/// Calls `body(begin, end)` for ranges of at most `grain` that cover [0, count) once each, on any thread in any order.
/// The first exception stops further ranges and is rethrown here. Inside another parallel loop it runs on the caller.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

/// of(0), of(1) … of(count − 1), each computed on any thread.
template <class Of>
auto parallel_results(int64_t count, const Of& of) {
  std::vector<std::invoke_result_t<const Of&, int64_t>> results(static_cast<size_t>(count));
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) results[static_cast<size_t>(i)] = of(i);
  });
  return results;
}

}  // namespace w4q
