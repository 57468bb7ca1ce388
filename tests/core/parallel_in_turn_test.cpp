#include "core/parallel_in_turn.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "support.h"

namespace w4q {
namespace {

class ParallelInTurn : public ::testing::Test {
 protected:
  void TearDown() override { set_threads(0); }
};

TEST_F(ParallelInTurn, DoesEachPieceOnce) {
  for (const int count : {1, 2, 7}) {
    set_threads(count);
    std::vector<std::atomic<int>> seen(100);
    parallel_in_turn(100, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
    for (const auto& times : seen) EXPECT_EQ(times, 1);
  }
  parallel_in_turn(0, [](int64_t) { ADD_FAILURE(); });
}

TEST_F(ParallelInTurn, OfSeveralFailuresTheFirstComesOut) {
  set_threads(4);
  std::atomic<bool> later{false};
  std::vector<std::atomic<int>> seen(100);
  const auto work = [&](int64_t i) {
    ++seen[static_cast<size_t>(i)];
    if (i == 7) {
      later = true;
      throw std::runtime_error("7");
    }
    if (i != 5) return;
    while (!later) std::this_thread::yield();  // it fails behind one that was taken up after it
    throw std::runtime_error("5");
  };
  try {
    parallel_in_turn(100, work);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "5");
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(seen[i], 1) << i;
}

}  // namespace
}  // namespace w4q
