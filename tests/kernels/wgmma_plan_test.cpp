#include "kernels/wgmma/plan.h"

#include <gtest/gtest.h>

namespace w4q::kernels::wgmma {
namespace {

TEST(WgmmaPlan, DoesAllJobsWithTheBlocksThereAre) {
  for (const int blocks : {1, 7, 78, 132}) {
    for (const int k_tiles : {1, 2, 5, 64, 224}) {
      for (const int most_rounds : {1, 2}) {
        for (int jobs = 1; jobs <= 600; ++jobs) {
          const Plan plan = best_plan(jobs, k_tiles, 4.0 / k_tiles, blocks, most_rounds);
          ASSERT_GE(plan.teams, 1);
          ASSERT_LE(plan.blocks(), blocks);
          ASSERT_LE(plan.sharers, std::min(most_sharers, k_tiles));
          const int rest = jobs - plan.whole_rounds * plan.blocks();
          ASSERT_GE(rest, 0);
          ASSERT_LE(rest, plan.shared_rounds() * plan.teams);
          if (plan.sharers > 1) {
            ASSERT_LE(plan.shared_rounds(), most_rounds);
          }
          ASSERT_LE(plan.cost(4.0 / k_tiles), plan_for(jobs, 1, blocks).cost(0));
        }
      }
    }
  }
}

TEST(WgmmaPlan, SharesJobsOfLayersThatAreSmallForTheGpu) {
  const auto sharers = [](int n, int k) { return best_plan((n + 255) / 256, k / 64, 4.0 / (k / 64), 132, 2).sharers; };
  EXPECT_EQ(sharers(4096, 4096), 8);
  EXPECT_EQ(sharers(6144, 4096), 5);
  EXPECT_EQ(sharers(14336, 4096), 2);
  EXPECT_EQ(sharers(28672, 4096), 1);
  EXPECT_EQ(sharers(256, 64), 1);
}

TEST(WgmmaPlan, TakesTilesThatHoldAllRows) {
  EXPECT_EQ(tile_rows(1), 16);
  EXPECT_EQ(tile_rows(16), 16);
  EXPECT_EQ(tile_rows(17), 32);
  EXPECT_EQ(tile_rows(33), 64);
  EXPECT_EQ(tile_rows(65), 128);
  EXPECT_EQ(tile_rows(2048), 128);
  EXPECT_EQ(tile_rows(128, 256), 128);
  EXPECT_EQ(tile_rows(129, 256), 256);
  EXPECT_EQ(tile_rows(257, 256), 128);  // three tiles, not four halves of them
  EXPECT_EQ(tile_rows(385, 256), 256);
  EXPECT_EQ(job_outputs(256) * 256, job_outputs(128) * 128);
}

}  // namespace
}  // namespace w4q::kernels::wgmma
