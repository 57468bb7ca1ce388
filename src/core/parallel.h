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

/// What `of` makes of each item of a list, in its order; each is computed on any thread.
template <class Item, class Of>
auto parallel_results(const std::vector<Item>& list, const Of& of) {
  std::vector<std::invoke_result_t<const Of&, const Item&>> results(list.size());
  parallel_for(static_cast<int64_t>(list.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) results[i] = of(list[i]);
  });
  return results;
}

}  // namespace w4q
