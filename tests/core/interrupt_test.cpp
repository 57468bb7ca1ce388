#include "core/interrupt.h"

#include <csignal>

#include "core/progress.h"
#include "support.h"

namespace w4q {
namespace {

/// In a child, because a noted signal stays noted for the life of the process.
TEST(Interrupt, SignalBecomesAnExceptionOfTheNextProgressStep) {
  const auto run = [] {
    install_interrupt_handler();
    set_progress_enabled(false);
    Progress progress("work", 10, "steps");
    progress.advance(1);
    std::raise(SIGTERM);
    try {
      progress.advance(1);
    } catch (const Interrupted& interrupted) {
      std::_Exit(interrupted.signal() == SIGTERM ? 17 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(17), "");
}

}  // namespace
}  // namespace w4q
