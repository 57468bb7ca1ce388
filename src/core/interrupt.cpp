#include "core/interrupt.h"

#include <csignal>
#include <initializer_list>

namespace w4q {
namespace {

volatile std::sig_atomic_t noted_signal = 0;

extern "C" void note_signal(int signal) {
  noted_signal = signal;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void install_interrupt_handler() noexcept {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, note_signal);
}

void check_interrupt() {
  if (noted_signal != 0) throw Interrupted(noted_signal);
}

}  // namespace w4q
