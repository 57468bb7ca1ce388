#include "core/parallel.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace w4q {
namespace {

/// Restores the default thread count whatever a test sets.
class Parallel : public ::testing::Test {
 protected:
  void TearDown() override { set_threads(0); }
};

TEST_F(Parallel, CoversEveryIndexOnceForAnyThreadCountAndGrain) {
  for (const int count : {1, 2, 3, 7}) {
    set_threads(count);
    for (const int64_t grain : {1, 3, 1000}) {
      std::vector<std::atomic<int>> seen(257);
      parallel_for(257, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST_F(Parallel, NothingToDoCallsNothing) {
  parallel_for(0, 4, [](int64_t, int64_t) { ADD_FAILURE(); });
}

TEST_F(Parallel, AnExceptionComesOutAndStopsTheRest) {
  set_threads(2);
  // More than a thread does while another begins to throw, which takes a millisecond of a busy machine.
  constexpr int count = 3'000'000;
  std::atomic<int> ran{0};
  EXPECT_THROW(parallel_for(count, 1,
                            [&](int64_t begin, int64_t) {
                              ++ran;
                              if (begin == 3) throw std::runtime_error("three");
                            }),
               std::runtime_error);
  EXPECT_LT(ran, count);
}

TEST_F(Parallel, NestedLoopsRunOnTheCaller) {
  set_threads(2);
  std::atomic<int> sum{0};
  parallel_for(4, 1, [&](int64_t, int64_t) {
    parallel_for(10, 1, [&](int64_t begin, int64_t end) { sum += static_cast<int>(end - begin); });
  });
  EXPECT_EQ(sum, 40);
}

TEST_F(Parallel, ThreadCountIsWhatWasSetOrAllCores) {
  set_threads(3);
  EXPECT_EQ(threads(), 3);
  set_threads(0);
  EXPECT_GE(threads(), 1);
}

}  // namespace
}  // namespace w4q
