// Ranks that run neighbouring layers side by side: the way of chunks, without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/rng.h"
#include "pipeline/layer_turns.h"
#include "thread_ranks.h"

namespace w4q::test {
namespace {

using pipeline::LayerTurn;
using pipeline::LayerTurns;

struct Walk {
  std::vector<int> owners;
  int ranks = 1;
  int64_t chunks = 1;
};

/// What a layer does to a chunk, and what a sum remembers: of chunks in their order.
uint64_t behind(int64_t layer, uint64_t state) { return splitmix64(state + static_cast<uint64_t>(layer)); }
uint64_t added(uint64_t sum, uint64_t state) { return splitmix64(sum ^ splitmix64(state)); }

using Sums = std::map<int64_t, uint64_t>;  // by layer

Sums by_one(const Walk& walk) {
  Sums sums;
  std::vector<uint64_t> states(static_cast<size_t>(walk.chunks));
  for (size_t chunk = 0; chunk < states.size(); ++chunk) states[chunk] = chunk + 1;
  for (int64_t layer = 0; layer < std::ssize(walk.owners); ++layer) {
    uint64_t sum = 0;
    for (uint64_t& state : states) sum = added(sum, state), state = behind(layer, state);
    if (walk.owners[static_cast<size_t>(layer)] >= 0) sums[layer] = sum;
  }
  return sums;
}

/// One rank's turn, as CalibrationCuda takes it; `kept` are the states that are here.
void take_turn(ranks::Ranks& ranks, const LayerTurn& turn, std::vector<uint64_t>& kept, Sums& sums) {
  const auto chunks = std::ssize(kept);
  const auto send = [&](int to, uint64_t state) {
    ranks.send(to, std::string(reinterpret_cast<const char*>(&state), sizeof state));
  };
  if (turn.layer == 0) {
    for (size_t chunk = 0; chunk < kept.size(); ++chunk) kept[chunk] = chunk + 1;
  }
  uint64_t arrived = 0, sum = 0;
  for (int64_t step = -1; step <= last_step(turn, chunks); ++step) {
    const auto now = step_of(turn, chunks, step);
    uint64_t state = 0;
    if (now.run) {
      state = turn.from < 0 ? kept[static_cast<size_t>(*now.run)] : arrived;
      sum = added(sum, state);
      state = behind(*turn.layer, state);
      if (turn.to < 0) kept[static_cast<size_t>(*now.run)] = state;
    }
    if (now.sent) send(turn.to, state);
    if (now.kept_sent) send(turn.kept_to, kept[static_cast<size_t>(*now.kept_sent)]);
    if (now.received) std::memcpy(&arrived, ranks.receive(turn.from).data(), sizeof arrived);
  }
  if (turn.layer && turn.sums) sums[*turn.layer] = sum;
}

void check(const Walk& walk) {
  const Sums expected = by_one(walk);
  const LayerTurns turns(walk.owners, walk.ranks);
  std::mutex mutex;
  Sums found;
  run_as_ranks(walk.ranks, [&](ranks::Ranks& ranks) {
    std::vector<uint64_t> kept(static_cast<size_t>(walk.chunks));
    Sums own;
    for (int64_t round = 0; round < turns.rounds(); ++round) {
      if (const auto turn = turns.turn(round, ranks.rank())) take_turn(ranks, *turn, kept, own);
    }
    const std::lock_guard lock(mutex);
    for (const auto& [layer, sum] : own) {
      EXPECT_TRUE(found.emplace(layer, sum).second) << "layer " << layer << " was run twice";
      EXPECT_EQ(turns.runner(layer), ranks.rank());
    }
  });
  EXPECT_EQ(found, expected);
}

/// Layers in turn, some of them finished by an earlier run, one that is wanted by a single rank, or all of them.
std::vector<int> some_owners(uint64_t seed, int64_t layers, int ranks) {
  std::vector<int> owners;
  int next = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const bool finished = seed % 3 == 1 && random_uniform(seed, static_cast<uint64_t>(layer)) < 0.5;
    owners.push_back(finished ? -1 : seed % 3 == 2 ? 0 : next++ % ranks);
  }
  return owners;
}

TEST(LayerTurns, SumsAreThoseOfOneProcess) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (const int ranks : {1, 2, 3, 5}) {
      const auto layers = static_cast<int64_t>(1 + random_bits(seed, 100) % 9);
      const auto chunks = static_cast<int64_t>(1 + random_bits(seed, 101) % 6);
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << ranks << " ranks, " << layers << " layers, "
                                      << chunks << " chunks");
      check({some_owners(seed, layers, ranks), ranks, chunks});
    }
  }
}

TEST(LayerTurns, WhoWantsALayerRunsIt) {
  const LayerTurns turns({0, 1, 2, 0, 1}, 3);
  EXPECT_EQ(turns.rounds(), 2);
  EXPECT_EQ(turns.round_of(2), 0);
  EXPECT_EQ(turns.round_of(4), 1);
  const auto first = turns.turn(0, 0), middle = turns.turn(0, 1), keeper = turns.turn(1, 2);
  ASSERT_TRUE(first && middle && keeper);
  EXPECT_EQ(first->from, -1);
  EXPECT_EQ(first->to, 1);
  EXPECT_EQ(middle->from, 0);
  EXPECT_EQ(middle->to, 2);
  EXPECT_EQ(middle->position, 1);
  EXPECT_FALSE(keeper->layer);
  EXPECT_EQ(keeper->kept_to, 0);
}

TEST(LayerTurns, WhatOneRankWantsAllRunInTurn) {
  const LayerTurns turns({0, 0, 0, 0}, 3);
  EXPECT_EQ(turns.rounds(), 2);
  for (const int64_t layer : {0, 1, 2, 3}) EXPECT_EQ(turns.runner(layer), layer % 3);
}

TEST(LayerTurns, LayersBehindTheLastThatIsWantedAreNotRun) {
  const LayerTurns turns({-1, 1, -1, -1}, 2);
  EXPECT_EQ(turns.rounds(), 1);
  EXPECT_FALSE(turns.turn(0, 0)->sums);
  EXPECT_TRUE(turns.turn(0, 1)->sums);
  EXPECT_EQ(LayerTurns({-1, -1}, 2).rounds(), 0);
  EXPECT_FALSE(LayerTurns({0, 1}, 3).takes_part(2));
}

/// In a round of two each rank waits for the other's chunk once, whatever the number of chunks.
TEST(LayerTurns, ARoundTakesAStepMoreForEachFurtherRank) {
  const LayerTurns turns({0, 1, 2}, 3);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(last_step(*turns.turn(0, rank), 16), 15 + rank);
}

}  // namespace
}  // namespace w4q::test
