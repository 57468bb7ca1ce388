// Progress of long work on stderr: a bar with the time left on a terminal, a plain line now and then otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace w4q {

/// Turns all progress output off (--quiet, tests). On by default.
void set_progress_enabled(bool enabled) noexcept;

/// How far one piece of work is; it may be kept longer than the work lasts.
struct ProgressState {
  std::string label;
  int64_t done = 0, total = 0;
  std::string unit;
};
/// Hears of all progress in place of stderr, whether that is on or off: at the beginning and the end of a piece of work
/// and ten times a second, out of the threads that work, one at a time for each piece. It must not throw.
using ProgressListener = std::function<void(const ProgressState&)>;
/// Called while nothing works. Null: progress goes to stderr again.
void set_progress_listener(ProgressListener listener);

/// One piece of long work. advance() may be called from any thread.
class Progress {
 public:
  /// `total` in `unit`s ("tensors", "tokens", "bytes"; bytes are shown as MB or GB).
  Progress(std::string label, int64_t total, std::string_view unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Throws Interrupted after a signal (core/interrupt.h).
  void advance(int64_t amount);

 private:
  void draw(int64_t done, std::chrono::steady_clock::time_point now);
  void tell(int64_t done) const;

  const std::string label_;
  const int64_t total_;
  const std::string unit_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  std::chrono::steady_clock::time_point next_draw_;
  bool drawn_ = false;
};

}  // namespace w4q
