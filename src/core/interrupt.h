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

/// From now on SIGINT, SIGTERM and SIGHUP are noted instead of ending the process; a second one ends it at once. Those
/// that are ignored already stay so (nohup). Before any other thread starts: a thread of their own waits for them, and
/// all others block them. A handler would write its frame below the stack pointer of whatever thread it interrupts, and
/// compiled kernels (oneDNN's sgemm) point that into the middle of the heap.
void watch_for_interrupts() noexcept;

/// Ends the process as the signal would have done by itself.
[[noreturn]] void end_by_signal(int signal) noexcept;

/// For programs that take signals themselves, w4q being a part of them: notes a signal as if it had come.
void note_interrupt(int signal) noexcept;
/// For their next work: what was noted is forgotten.
void forget_interrupt() noexcept;

/// The signal that has been noted; 0: none.
int noted_interrupt() noexcept;

/// Throws Interrupted when a signal has been noted. Progress::advance calls it.
void check_interrupt();

}  // namespace w4q
