// Whether other ranks live: a thread of each says so from time to time, whatever the rank works on. A rank that is
// stopped, or that no network leads to any more, neither fails nor ends; that it is silent is all there is to notice.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "ranks/transport.h"

namespace w4q::ranks {

class Pulse {
 public:
  using Clock = std::chrono::steady_clock;

  /// What it does for the rank that it belongs to.
  struct Duties {
    /// Moves messages on, and says whether some are on their way still.
    std::function<bool()> move;
    /// Called once, where a rank is lost and nobody stops this for some seconds more: the rank hangs, as in a file that
    /// lies behind the same network.
    std::function<void()> give_up;
  };

  /// The first rank listens to all, the others to it. `mutex` guards `transport`; `tag` is this thread's alone. Who is
  /// silent for `patience` is lost, zero: nobody is for that; and whose process is known to have ended.
  Pulse(Transport& transport, std::mutex& mutex, int tag, Clock::duration patience, Duties duties);
  ~Pulse() { stop(); }
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  /// Says nothing more, and hears nothing.
  void stop();
  /// There are messages to move on.
  void wake();
  /// The first rank that was lost; −1: none.
  int lost() const noexcept { return lost_; }
  /// What that means for the run, once one is.
  const Error& lost_error() const { return *lost_error_; }

 private:
  struct Other {
    int rank = 0;
    std::string host;
    Clock::time_point heard;
    Transport::Request* beat = nullptr;
  };

  void run();
  void listen(Clock::time_point now);
  std::optional<Error> loss_of(const Other& other, Clock::time_point now);
  void speak();
  void rest();

  Transport& transport_;
  std::mutex& mutex_;
  const int tag_;
  const Clock::duration patience_;
  Duties duties_;
  std::string host_;
  std::vector<Other> others_;
  std::atomic<int> lost_{-1};
  std::optional<Error> lost_error_;  // written before lost_
  Clock::time_point lost_since_;
  std::mutex rest_;
  std::condition_variable woken_;
  bool moving_ = false;   // guarded by rest_
  int moving_rests_ = 0;  // one after the other in which messages moved to the end
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

/// W4Q_RANK_TIMEOUT in seconds, or else 15.
Pulse::Clock::duration pulse_patience();
std::string host_name();

}  // namespace w4q::ranks
