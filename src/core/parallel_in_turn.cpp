#include "core/parallel_in_turn.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "core/parallel.h"

namespace w4q {

void parallel_in_turn(int64_t count, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> end{count};
  std::exception_ptr failure;
  std::mutex mutex;
  parallel_for(std::min<int64_t>(count, threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < end; i = next++) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i >= end) continue;
        end = i;
        failure = std::current_exception();
      }
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace w4q
