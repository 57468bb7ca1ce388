// Which rank runs which layer of a walk on GPUs, and how hidden states go from one to the next.
//
// Layers are run in rounds, in which each rank has one at most. Windows go through a round in chunks: in step t its
// first layer runs chunk t, the second chunk t − 1, and so on; between two steps chunks change hands, all at once. What
// leaves the last layer of a round stays where it is until the next round asks for it, chunk by chunk. So a layer's sums
// are made by one rank, chunk after chunk, as one process does; and sums, by far larger than hidden states, stay.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace w4q::pipeline {

/// What one rank does in a round.
struct LayerTurn {
  std::optional<int64_t> layer;  ///< that it runs; nothing: it only hands on what it kept
  int position = 0;              ///< of the layer in the round
  int from = -1;                 ///< the rank that hidden states come from; −1: they are here
  int to = -1;                   ///< the rank that they go to; −1: they stay here
  int kept_to = -1;              ///< the rank that takes those of the round before; −1: there are none, or they stay
  bool sums = true;              ///< whether anybody wants what the layer's linears read
};

/// What a rank does in one step of its turn: it runs a chunk, then sends and receives.
struct TurnStep {
  std::optional<int64_t> run, sent, kept_sent, received;  ///< chunks
};
/// Steps of a turn are −1, which only brings the first chunk, to last_step().
int64_t last_step(const LayerTurn& turn, int64_t chunks);
TurnStep step_of(const LayerTurn& turn, int64_t chunks, int64_t step);

class LayerTurns {
 public:
  /// `owners`: for each layer the rank that wants its sums; −1: none does. Whoever wants a layer's sums runs it, unless
  /// one rank wants all there are: then ranks run layers in turn.
  LayerTurns(const std::vector<int>& owners, int ranks);

  /// Up to the last layer that is wanted.
  int64_t rounds() const noexcept { return static_cast<int64_t>(rounds_.size()); }
  int64_t round_of(int64_t layer) const;
  int runner(int64_t layer) const { return runners_.at(static_cast<size_t>(layer)); }
  /// Nothing: the rank has no part in the round.
  std::optional<LayerTurn> turn(int64_t round, int rank) const;
  /// Whether it ever has one.
  bool takes_part(int rank) const;

 private:
  std::vector<int> owners_, runners_;                // of layers
  std::vector<std::pair<int64_t, int64_t>> rounds_;  // first layer and end
};

}  // namespace w4q::pipeline
