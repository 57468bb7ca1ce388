#include <algorithm>
#include <numeric>

#include "core/rng.h"
#include "pipeline/shared_output.h"
#include "support.h"

namespace w4q::test {
namespace {

using pipeline::deal;

std::vector<int64_t> loads(const std::vector<int64_t>& costs, int ranks) {
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  const auto owners = deal(costs, ranks);
  for (size_t i = 0; i < costs.size(); ++i) load[static_cast<size_t>(owners[i])] += costs[i];
  return load;
}

TEST(Deal, TheCostliestGoFirstToWhoHasTheLeast) {
  EXPECT_EQ(deal(std::vector<int64_t>{1, 5, 3, 3}, 2), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(deal(std::vector<int64_t>{2, 2, 2, 2}, 3), (std::vector<int>{0, 1, 2, 0}));
  EXPECT_EQ(deal(std::vector<int64_t>{}, 3), std::vector<int>{});
  EXPECT_EQ(deal(std::vector<int64_t>{4, 1}, 1), (std::vector<int>{0, 0}));
}

/// Graham's bound for the costliest first: at most 4/3 of the best, which is at least the mean and at least the largest.
TEST(Deal, NoRankHasFarMoreThanItsShare) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<int64_t> costs(200);
    for (size_t i = 0; i < costs.size(); ++i) costs[i] = 1 + static_cast<int64_t>(1e6 * random_uniform(seed, i));
    for (const int ranks : {1, 2, 7, 64}) {
      const auto load = loads(costs, ranks);
      const int64_t sum = std::accumulate(costs.begin(), costs.end(), int64_t{0});
      ASSERT_EQ(std::accumulate(load.begin(), load.end(), int64_t{0}), sum);
      // The best is no less than these; it may be more, by one of the smaller costs that must go somewhere.
      const double best = std::max(static_cast<double>(sum) / ranks, static_cast<double>(std::ranges::max(costs)));
      std::vector<int64_t> sorted = costs;
      std::ranges::sort(sorted, std::greater());
      const auto shared = static_cast<size_t>(ranks) < sorted.size() ? sorted[static_cast<size_t>(ranks)] : 0;
      EXPECT_LE(static_cast<double>(std::ranges::max(load)), best + static_cast<double>(shared));
    }
  }
}

}  // namespace
}  // namespace w4q::test
