#include "core/lanes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <stdexcept>
#include <vector>

namespace w4q {
namespace {

TEST(Lanes, EveryTaskRunsOnceInALaneThatThereIs) {
  for (const size_t lanes : {1, 2, 5}) {
    for (const size_t count : {0, 1, 4, 33}) {
      std::vector<std::atomic<int>> seen(count);
      run_lanes(lanes, count, [&](size_t lane, size_t index) {
        EXPECT_LT(lane, lanes);
        ++seen[index];
      });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

/// Tasks that wait for one another get to each other.
TEST(Lanes, TasksRunSideBySide) {
  std::barrier both(2);
  run_lanes(2, 2, [&](size_t, size_t) { both.arrive_and_wait(); });
}

TEST(Lanes, TheFirstExceptionComesOutAndNothingBeginsBehindIt) {
  std::atomic<size_t> ran{0};
  try {
    run_lanes(2, 1000, [&](size_t, size_t index) {
      ++ran;
      if (index == 3) throw std::runtime_error("three");
      if (index > 3) throw std::runtime_error("late");
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error&) {
  }
  EXPECT_LE(ran, 6u);
}

}  // namespace
}  // namespace w4q
