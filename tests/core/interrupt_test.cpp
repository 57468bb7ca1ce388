#include "core/interrupt.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "core/progress.h"
#include "support.h"

namespace w4q {
namespace {

/// In a child, because a noted signal stays noted for the life of the process.
TEST(Interrupt, SignalBecomesAnExceptionOfAProgressStep) {
  const auto run = [] {
    watch_for_interrupts();
    set_progress_enabled(false);
    Progress progress("work", 1, "steps");
    progress.advance(1);
    ::kill(::getpid(), SIGTERM);
    try {
      for (int i = 0; i < 10'000; ++i) {
        progress.advance(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const Interrupted& interrupted) {
      std::_Exit(interrupted.signal() == SIGTERM ? 17 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(17), "");
}

/// A handler's frame on the stack of such a thread could lie in the heap (interrupt.h). What is ignored stays so.
TEST(Interrupt, NoThreadThatComputesIsInterrupted) {
  const auto run = [] {
    std::signal(SIGHUP, SIG_IGN);
    watch_for_interrupts();
    const auto blocks = [](int signal) {
      sigset_t blocked;
      ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
      return ::sigismember(&blocked, signal) == 1;
    };
    const auto blocks_all = [&] { return blocks(SIGINT) && blocks(SIGTERM) && !blocks(SIGHUP); };
    bool another = false;
    std::thread([&] { another = blocks_all(); }).join();
    std::_Exit(another && blocks_all() ? 17 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(17), "");
}

TEST(Interrupt, EndsAsBySignalAlone) {
  const auto run = [] {
    watch_for_interrupts();
    end_by_signal(SIGINT);
  };
  EXPECT_EXIT(run(), ::testing::KilledBySignal(SIGINT), "");
}

TEST(Interrupt, ASecondSignalEndsAtOnce) {
  const auto run = [] {
    watch_for_interrupts();
    for (int i = 0; i < 10'000; ++i) {
      ::kill(::getpid(), SIGTERM);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(run(), ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace w4q
