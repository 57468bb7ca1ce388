// Wall time of a piece of work.
#pragma once

#include <chrono>

namespace w4q {

/// Starts when it is made.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace w4q
