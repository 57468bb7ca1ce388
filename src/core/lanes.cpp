#include "core/lanes.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace w4q {

void run_lanes(size_t lanes, size_t count, const std::function<void(size_t, size_t)>& task) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  const auto run = [&](size_t lane) {
    try {
      for (size_t index = next++; index < count && !failed; index = next++) task(lane, index);
    } catch (...) {
      // An exception must not leave a thread: the first is kept.
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t lane = 1; lane < lanes && lane < count; ++lane) others.emplace_back(run, lane);
    run(0);
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace w4q
