// Ctrl-C and kill as an exception, so that half-written outputs are cleaned up on the way out.
#pragma once

#include <exception>

namespace w4q {

/// Thrown by check_interrupt(). Not an Error: nothing is wrong, the user wants to stop.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(int signal) : signal_(signal) {}
  int signal() const noexcept { return signal_; }
  const char* what() const noexcept override { return "interrupted"; }

 private:
  int signal_;
};

/// From now on SIGINT, SIGTERM and SIGHUP are noted instead of ending the process; a second one ends it at once.
void install_interrupt_handler() noexcept;

/// Throws Interrupted when a signal has been noted. Progress::advance calls it.
void check_interrupt();

}  // namespace w4q
