#include "core/parallel.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace w4q {
namespace {

std::atomic<int> configured_threads{0};

}  // namespace

void set_threads(int count) { configured_threads = std::max(count, 0); }

int threads() noexcept {
  const int configured = configured_threads;
  return configured > 0 ? configured : omp_get_num_procs();
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t ranges = (count + grain - 1) / grain;
  const auto team = static_cast<int>(std::min<int64_t>(threads(), ranges));
  if (team <= 1 || omp_in_parallel()) {
    for (int64_t range = 0; range < ranges; ++range) body(range * grain, std::min(count, (range + 1) * grain));
    return;
  }
  std::exception_ptr failure;
  std::atomic<bool> failed{false};
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (int64_t range = 0; range < ranges; ++range) {
    if (failed.load(std::memory_order_relaxed)) continue;
    try {
      body(range * grain, std::min(count, (range + 1) * grain));
    } catch (...) {
      // An exception must not leave an OpenMP region: keep the first and rethrow it behind the loop.
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace w4q
