#include "core/progress.h"

#include <csignal>
#include <string>
#include <vector>

#include "core/interrupt.h"
#include "support.h"

namespace w4q {
namespace {

/// What a program hears that w4q is a part of.
class Listened : public ::testing::Test {
 protected:
  void SetUp() override {
    set_progress_listener([this](const ProgressState& state) { states_.push_back(state); });
  }
  void TearDown() override {
    set_progress_listener(nullptr);
    forget_interrupt();
  }

  std::vector<ProgressState> states_;
};

TEST_F(Listened, TellsTheBeginningAndTheEndWhetherProgressIsShownOrNot) {
  set_progress_enabled(false);
  {
    Progress progress("packing", 3, "tensors");
    progress.advance(2);
    progress.advance(2);  // more than was announced
  }
  set_progress_enabled(true);
  ASSERT_GE(states_.size(), 2u);
  EXPECT_EQ(states_.front().done, 0);
  EXPECT_EQ(states_.back().done, 3);
  EXPECT_EQ(states_.back().total, 3);
  EXPECT_EQ(states_.back().label, "packing");
  EXPECT_EQ(states_.back().unit, "tensors");
}

TEST_F(Listened, WritesNothing) {
  ::testing::internal::CaptureStderr();
  { Progress("packing", 1, "tensors").advance(1); }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(Listened, ANotedSignalStopsWorkUntilItIsForgotten) {
  Progress progress("packing", 2, "tensors");
  note_interrupt(SIGINT);
  EXPECT_THROW(progress.advance(1), Interrupted);
  forget_interrupt();
  EXPECT_NO_THROW(progress.advance(1));
}

}  // namespace
}  // namespace w4q
