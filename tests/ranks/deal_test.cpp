#include <algorithm>
#include <fstream>
#include <numeric>

#include "core/rng.h"
#include "launch.h"
#include "pipeline/plan.h"
#include "pipeline/shared_output.h"
#include "support.h"

namespace w4q::test {
namespace {

std::vector<int> deal(const std::vector<int64_t>& costs, int ranks, bool in_turn = false) {
  std::vector<pipeline::WorkUnit> units;
  for (const int64_t cost : costs) units.push_back({.name = "", .tensors = {}, .cost = cost, .in_turn = in_turn});
  std::vector<const pipeline::WorkUnit*> pointers;
  for (const auto& unit : units) pointers.push_back(&unit);
  return pipeline::deal(pointers, ranks);
}

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

TEST(Deal, LayersGoInTurnWhateverTheyCost) {
  EXPECT_EQ(deal(std::vector<int64_t>{9, 1, 5, 7}, 3, true), (std::vector<int>{0, 1, 2, 0}));
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

/// `--dry-run --ranks` tells who reads and writes what: together all of it, once.
class RanksPlanned : public OnBundledModel {};

TEST_F(RanksPlanned, SharesAddUpToTheWhole) {
  const std::vector<std::string> how{"--k", "3", "--device", "cpu", "--dry-run", "--ranks", "3"};
  const auto run = quantize("q", how);
  ASSERT_EQ(run.status, 0) << run.err;
  const auto plan = run.json();
  int64_t parts = 0, reads = 0, writes = 0, most = 0, largest = 0;
  for (const auto& own : plan.at("ranks").at("each")) {
    parts += own.at("parts").get<int64_t>();
    reads += own.at("reads").get<int64_t>();
    writes += own.at("writes").get<int64_t>();
    most = std::max(most, own.at("reads").get<int64_t>());
  }
  for (const auto& tensor : plan.at("tensors")) largest = std::max(largest, tensor.at("bytes_before").get<int64_t>());
  EXPECT_EQ(plan.at("ranks").at("each").size(), 3u);
  EXPECT_EQ(parts, static_cast<int64_t>(plan.at("tensors").size()));
  EXPECT_EQ(reads, plan.at("bytes_before").get<int64_t>());
  EXPECT_EQ(writes, plan.at("bytes_after").get<int64_t>());
  // What came last to the fullest rank came when it had at most a third of the rest.
  EXPECT_LE(3 * most, reads + 2 * largest);
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

/// Four windows for 64 ranks: four decode them, as many have a layer, the others what is left or nothing.
TEST_F(RanksPlanned, RanksWithoutWorkAskForNothing) {
  const auto run = quantize("q", {"--recipe", "kbit3: feedback", "--calib", own_text(), "--samples", "4", "--length",
                                  "64", "--device", "cpu", "--dry-run", "--ranks", "64"});
  ASSERT_EQ(run.status, 0) << run.err;
  const auto plan = run.json();
  const auto& each = plan.at("ranks").at("each");
  int64_t layers = 0;
  for (const auto& tensor : plan.at("tensors")) {
    const bool inside = tensor.at("name").get<std::string>().find(".layers.") != std::string::npos;
    layers += inside ? tensor.at("bytes_before").get<int64_t>() : 0;
  }
  int64_t reads = 0, idle = 0;
  for (const auto& own : each) {
    reads += own.at("reads").get<int64_t>();
    if (own.at("parts") != 0) continue;
    ++idle;
    EXPECT_EQ(own.at("reads"), 0);
    EXPECT_EQ(own.at("seconds"), 0);
    EXPECT_EQ(own.at("memory_bytes"), pipeline::base_memory);
  }
  EXPECT_GE(idle, 50);
  EXPECT_EQ(reads, plan.at("bytes_before").get<int64_t>() + 4 * layers);
  EXPECT_GT(each.at(0).at("memory_bytes"), plan.at("expected_memory_bytes"));  // sums travel
}

/// What was packed is read and written once more for a dialect.
TEST_F(RanksPlanned, TheSecondStepOfADialectCounts) {
  const auto run = quantize(
      "q", {"--scheme", "int4-g64-f16-asym", "--to", "awq-gemm", "--device", "cpu", "--dry-run", "--ranks", "3"});
  ASSERT_EQ(run.status, 0) << run.err;
  const auto plan = run.json();
  int64_t reads = 0, writes = 0;
  for (const auto& own : plan.at("ranks").at("each")) {
    reads += own.at("reads").get<int64_t>();
    writes += own.at("writes").get<int64_t>();
  }
  EXPECT_EQ(reads, plan.at("bytes_before").get<int64_t>() + plan.at("bytes_after").get<int64_t>());
  EXPECT_EQ(writes, 2 * plan.at("bytes_after").get<int64_t>());
}

/// What others than the first rank wrote is read once more where it lies, and written by the first.
TEST_F(RanksPlanned, PartsOfOtherDisksGoThroughTheFirst) {
  const std::vector<std::string> how{"--k", "3", "--device", "cpu", "--dry-run", "--ranks", "3"};
  auto apart = how;
  apart.emplace_back("--local-disks");
  const auto shared = quantize("q", how).json().at("ranks"), run = quantize("q", apart).json().at("ranks");
  EXPECT_FALSE(shared.contains("gathered_bytes"));
  int64_t gathered = 0;
  for (size_t rank = 1; rank < 3; ++rank) {
    const auto &before = shared.at("each").at(rank), &after = run.at("each").at(rank);
    const auto writes = before.at("writes").get<int64_t>();
    gathered += writes;
    EXPECT_EQ(after.at("writes"), writes);
    EXPECT_EQ(after.at("reads"), before.at("reads").get<int64_t>() + writes);
  }
  EXPECT_EQ(run.at("gathered_bytes"), gathered);
  EXPECT_EQ(run.at("each").at(0).at("writes"), shared.at("each").at(0).at("writes").get<int64_t>() + gathered);
  EXPECT_EQ(run.at("seconds"), run.at("each").at(0).at("seconds"));
}

/// One layer whose sums, 44 MB, fit where none travel.
TEST_F(RanksPlanned, MemoryThatSumsOnTheirWayTakeCounts) {
  if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  write_sparse_model(path("m"), 1, 1024, 2816);
  const std::string ids = path("ids");
  std::ofstream(ids, std::ios::binary) << std::string(4096, '\0');
  const auto run = run_ranks(2, {"calibrate", path("m"), "--ids", ids, "-o", path("s.safetensors"), "--samples", "4",
                                 "--length", "64", "--max-memory", "200MB", "--device", "cpu", "--quiet"});
  EXPECT_EQ(run.status, 2) << run.err;
  EXPECT_EQ(count(run.err, "error: --max-memory 200 MB is not enough"), 1u) << run.err;
  EXPECT_NE(run.err.find("for sums that go from rank to rank"), std::string::npos) << run.err;
}

TEST_F(RanksPlanned, BelongsToADryRun) {
  const auto run = quantize("q", {"--k", "3", "--ranks", "3"});
  EXPECT_EQ(run.status, 2);
  EXPECT_NE(run.err.find("belongs to --dry-run"), std::string::npos) << run.err;
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

}  // namespace
}  // namespace w4q::test
