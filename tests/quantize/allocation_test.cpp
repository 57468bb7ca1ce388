// The allocation of bits against trying everything.
#include "quantize/allocation.h"

#include <limits>

#include "core/rng.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using Items = std::vector<std::vector<AllocationChoice>>;

Items random_items(uint64_t seed, size_t count, size_t choices) {
  Items items(count);
  uint64_t draw = 0;
  for (auto& item : items) {
    for (size_t c = 0; c < choices; ++c) {
      const auto bytes = 8 * static_cast<int64_t>(1 + 40 * random_uniform(seed, draw++));
      item.push_back({bytes, random_uniform(seed, draw++)});
    }
  }
  return items;
}

/// The least cost of at most `bytes`, by trying all.
double least_cost(const Items& items, int64_t bytes, size_t first = 0) {
  if (first == items.size()) return bytes >= 0 ? 0 : std::numeric_limits<double>::infinity();
  double best = std::numeric_limits<double>::infinity();
  for (const auto& choice : items[first]) {
    best = std::min(best, choice.cost + least_cost(items, bytes - choice.bytes, first + 1));
  }
  return best;
}

TEST(Allocation, IsTheBestOfAll) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Items items = random_items(seed, 5, 4);
    const AllocationFrontier frontier(items);
    for (int64_t bytes = frontier.smallest(); bytes < frontier.smallest() + 700; bytes += 37) {
      const auto choices = frontier.choose(bytes);
      ASSERT_EQ(choices.size(), items.size());
      const auto point = frontier.point(choices);
      EXPECT_LE(point.bytes, bytes);
      EXPECT_NEAR(point.cost, least_cost(items, bytes), 1e-12) << "seed " << seed << ", " << bytes << " bytes";
    }
  }
}

TEST(Allocation, MoreBytesNeverCostMore) {
  const AllocationFrontier frontier(random_items(3, 40, 5));
  double before = std::numeric_limits<double>::infinity();
  for (int64_t bytes = frontier.smallest(); bytes < frontier.smallest() + 9000; bytes += 8) {
    const double cost = frontier.point(frontier.choose(bytes)).cost;
    EXPECT_LE(cost, before);
    before = cost;
  }
}

TEST(Allocation, TooFewBytesAreRefusedAndEqualCostsStaySmall) {
  const AllocationFrontier frontier({{{10, 1.0}, {30, 1.0}}, {{5, 0.0}, {7, 0.0}}});
  EXPECT_EQ(frontier.smallest(), 15);
  EXPECT_TRUE(frontier.choose(14).empty());
  EXPECT_EQ(frontier.choose(1000), (std::vector<size_t>{0, 0}));
}

TEST(Allocation, CoarseSizesStayWithinTheLimit) {
  const Items items = random_items(5, 8, 4);
  const AllocationFrontier exact(items), coarse(items, 200);
  for (int64_t bytes = exact.smallest(); bytes < exact.smallest() + 1500; bytes += 60) {
    const auto fine = exact.point(exact.choose(bytes)), rough = coarse.point(coarse.choose(bytes));
    EXPECT_LE(rough.bytes, bytes);
    EXPECT_GE(rough.cost, fine.cost - 1e-12);
  }
}

}  // namespace
}  // namespace w4q::quantize
