#include "core/interrupt.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <initializer_list>
#include <system_error>
#include <thread>

#include "core/interrupt_check.h"

namespace w4q {
namespace {

std::atomic<int> noted_signal{0};
void (*other_check)() = nullptr;
void (*signal_listener)(int signal) = nullptr;

sigset_t watched_signals() noexcept {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction current {};
    const bool ignored = ::sigaction(signal, nullptr, &current) == 0 && current.sa_handler == SIG_IGN;
    if (!ignored) ::sigaddset(&signals, signal);
  }
  return signals;
}

void watch(sigset_t signals) noexcept {
  int signal = 0;
  if (::sigwait(&signals, &signal) == 0) noted_signal = signal;
  // Only this thread takes the next one, with its usual effect.
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  if (signal_listener != nullptr && signal != 0) signal_listener(signal);
  while (true) ::pause();
}

}  // namespace

void watch_for_interrupts() noexcept {
  const sigset_t signals = watched_signals();
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  try {
    std::thread(watch, signals).detach();
  } catch (const std::system_error&) {
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // no thread to be had: they end the process without a word
  }
}

void end_by_signal(int signal) noexcept {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, signal);
  std::signal(signal, SIG_DFL);
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  std::raise(signal);
  std::_Exit(128 + signal);
}

void note_interrupt(int signal) noexcept { noted_signal = signal; }

void forget_interrupt() noexcept { noted_signal = 0; }

int noted_interrupt() noexcept { return noted_signal; }

void set_interrupt_listener(void (*listener)(int signal)) noexcept { signal_listener = listener; }

void set_interrupt_check(void (*check)()) noexcept { other_check = check; }

void check_interrupt() {
  if (const int signal = noted_signal) throw Interrupted(signal);
  if (other_check != nullptr) other_check();
}

}  // namespace w4q
