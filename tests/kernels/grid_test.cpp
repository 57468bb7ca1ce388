// How work is cut for a GPU depends on nothing but what the GPU is: a table of cards, none of which has to be here.
#include "kernels/common/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/attention/decode_plan.h"
#include "kernels/common/divider.h"
#include "kernels/integer/int8_tiling.h"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels {
namespace {

/// A card, and what follows from it.
struct Card {
  device::Properties gpu;
  bool large_blocks, warpgroups;
  int attention_splits;  ///< of 8 key heads, 4 query heads each
  int int8_splits;       ///< of 64 rows by 4096 × 4096
};

Card card(const char* name, int sm, int multiprocessors, int block_kb, bool large, bool warpgroups, int attention,
          int int8) {
  return {.gpu = {.name = name,
                  .sm = sm,
                  .multiprocessors = multiprocessors,
                  .shared_bytes_per_block_optin = int64_t{block_kb} << 10,
                  .shared_bytes_per_multiprocessor = int64_t{block_kb + 1} << 10},
          .large_blocks = large,
          .warpgroups = warpgroups,
          .attention_splits = attention,
          .int8_splits = int8};
}

const std::vector<Card> cards = {
    card("RTX 4090", 89, 128, 99, false, false, 16, 8), card("A100", 80, 108, 163, true, false, 13, 6),
    card("H100", 90, 132, 227, true, true, 16, 8),      card("H200", 90, 132, 227, true, true, 16, 8),
    card("L40", 89, 142, 99, false, false, 17, 8),      card("RTX 3090", 86, 82, 99, false, false, 10, 5)};

TEST(Grid, OneBlockAMultiprocessorUnlessTilesAreFew) {
  for (const Card& card : cards) {
    EXPECT_EQ(blocks_for(card.gpu, 1), 1) << card.gpu.name;
    EXPECT_EQ(blocks_for(card.gpu, 4 * 7), 7) << card.gpu.name;
    EXPECT_EQ(blocks_for(card.gpu, int64_t{1} << 30), card.gpu.multiprocessors) << card.gpu.name;
  }
}

/// Units of the longest run where so many blocks share them, each with `parts` runs.
int64_t longest_run(int64_t units, int parts, int64_t blocks) {
  const int64_t of_block = (units + blocks - 1) / blocks;
  return (of_block + parts - 1) / parts;
}

TEST(Grid, FewestBlocksWhoseLongestRunIsNoLonger) {
  for (const int most : {1, 82, 128, 132}) {
    for (const int parts : {1, 4, 12}) {
      for (int64_t units = 1; units < 8000; units += 1 + units / 7) {
        const int blocks = fewest_blocks(units, parts, most);
        ASSERT_GE(blocks, 1);
        ASSERT_LE(blocks, most);
        const int64_t longest = longest_run(units, parts, most);
        EXPECT_EQ(longest_run(units, parts, blocks), longest) << units << " units, " << parts << " parts, " << most;
        if (blocks == 1) continue;
        EXPECT_GT(longest_run(units, parts, blocks - 1), longest) << units << " units, " << parts << " parts, " << most;
      }
    }
  }
  // Quarters of 4096 inputs and 4096, 6144 and 28672 outputs; of 14336 inputs: four blocks share 128 outputs, not six.
  for (const int64_t units : {32 * 32, 48 * 32, 224 * 32, 32 * 112}) EXPECT_EQ(fewest_blocks(units, 4, 132), 128);
}

TEST(Grid, KernelsGoByTheSizeOfBlocksAndTheArchitecture) {
  for (const Card& card : cards) {
    EXPECT_EQ(has_large_blocks(card.gpu), card.large_blocks) << card.gpu.name;
    EXPECT_EQ(wgmma::runs_on(card.gpu), card.warpgroups) << card.gpu.name;
    EXPECT_GE(card.gpu.shared_bytes_per_block_optin, least_shared_bytes) << card.gpu.name;
  }
}

TEST(Grid, AttentionOfOneTokenFillsTheGpu) {
  for (const Card& card : cards) {
    const auto plan = decode::plan_for(card.gpu, 32, 8);
    EXPECT_EQ(plan.splits, card.attention_splits) << card.gpu.name;
    EXPECT_EQ(plan.head_tiles, 1) << card.gpu.name;
    // More query heads than an mma has columns take tiles; no card is cut into more than the merge takes.
    EXPECT_EQ(decode::plan_for(card.gpu, 48, 4).head_tiles, 2) << card.gpu.name;
    EXPECT_EQ(decode::plan_for(card.gpu, 1, 1).splits, decode::most_splits) << card.gpu.name;
    EXPECT_EQ(decode::plan_for(card.gpu, 4096, 4096).splits, 1) << card.gpu.name;
  }
}

TEST(Grid, Int8TilesAreSharedWhereTheyAreFew) {
  for (const Card& card : cards) {
    const auto tiling = int8::tiling_of(card.gpu, 64, 4096, 4096);
    EXPECT_EQ(tiling.count(), 16) << card.gpu.name;
    EXPECT_EQ(tiling.splits, card.int8_splits) << card.gpu.name;
    EXPECT_EQ(int8::tiling_of(card.gpu, 2048, 14336, 4096).splits, 1) << card.gpu.name;
    // A block along k has at least 512 inputs.
    EXPECT_EQ(int8::tiling_of(card.gpu, 64, 256, 1024).splits, 2) << card.gpu.name;
  }
}

TEST(Grid, WarpgroupsExchangeSumsOfEveryBlock) {
  for (const Card& card : cards) {
    EXPECT_EQ(wgmma::exchange_bytes(card.gpu.multiprocessors),
              static_cast<size_t>(card.gpu.multiprocessors) * 256 * 128 * 4);
  }
}

/// Around every multiple that can be told from its neighbours, up to the largest number.
TEST(Dividers, DivideEveryNumber) {
  constexpr int64_t most = (int64_t{1} << 31) - 1;
  for (const int64_t divisor :
       {1, 2, 3, 5, 7, 12, 24, 32, 45, 96, 100, 257, 4096, 12288, 65535, 1 << 30, (1 << 30) + 1}) {
    const Divider by(static_cast<uint32_t>(divisor));
    const int64_t step = divisor * std::max<int64_t>(most / divisor / 1000, 1);
    for (int64_t multiple = 0; multiple <= most + 1; multiple += step) {
      for (int64_t number = std::max<int64_t>(multiple - 1, 0); number <= std::min(multiple + 1, most); ++number) {
        ASSERT_EQ(by.quotient(static_cast<int>(number)), number / divisor) << number << " by " << divisor;
      }
    }
    EXPECT_EQ(by.quotient(static_cast<int>(most)), most / divisor) << divisor;
  }
  EXPECT_EQ(Divider().quotient(7), 7);
}

}  // namespace
}  // namespace w4q::kernels
