#include "pipeline/layer_turns.h"

#include <algorithm>

#include "core/error.h"

namespace w4q::pipeline {
namespace {

std::optional<int64_t> in_range(int64_t chunk, int64_t chunks) {
  return chunk >= 0 && chunk < chunks ? std::optional(chunk) : std::nullopt;
}

/// Whether one rank wants all that is wanted, of several ranks.
bool one_wants_all(const std::vector<int>& owners) {
  const auto first = std::ranges::find_if(owners, [](int owner) { return owner >= 0; });
  return std::all_of(first, owners.end(), [&](int owner) { return owner < 0 || owner == *first; });
}

}  // namespace

int64_t last_step(const LayerTurn& turn, int64_t chunks) { return chunks - 1 + turn.position; }

TurnStep step_of(const LayerTurn& turn, int64_t chunks, int64_t step) {
  TurnStep result;
  if (turn.kept_to >= 0) result.kept_sent = in_range(step + 1, chunks);
  if (!turn.layer) return result;
  result.run = in_range(step - turn.position, chunks);
  if (turn.to >= 0) result.sent = result.run;
  if (turn.from >= 0) result.received = in_range(step + 1 - turn.position, chunks);
  return result;
}

LayerTurns::LayerTurns(const std::vector<int>& owners, int ranks) : owners_(owners) {
  while (!owners_.empty() && owners_.back() < 0) owners_.pop_back();
  const bool in_turn = one_wants_all(owners_);
  std::vector<bool> busy;
  for (int64_t layer = 0; layer < std::ssize(owners_); ++layer) {
    const int owner = owners_[static_cast<size_t>(layer)];
    const int runner = owner < 0 || in_turn ? static_cast<int>(layer % ranks) : owner;
    ensure(runner < ranks, "LayerTurns: no such rank");
    runners_.push_back(runner);
    if (busy.empty() || busy[static_cast<size_t>(runner)]) {
      rounds_.emplace_back(layer, layer);
      busy.assign(static_cast<size_t>(ranks), false);
    }
    busy[static_cast<size_t>(runner)] = true;
    rounds_.back().second = layer + 1;
  }
}

int64_t LayerTurns::round_of(int64_t layer) const {
  const auto found = std::ranges::find_if(rounds_, [&](const auto& round) { return layer < round.second; });
  ensure(found != rounds_.end(), "LayerTurns: a layer that nobody wants");
  return found - rounds_.begin();
}

std::optional<LayerTurn> LayerTurns::turn(int64_t round, int rank) const {
  const auto [first, end] = rounds_.at(static_cast<size_t>(round));
  LayerTurn turn;
  const int kept_by = first > 0 ? runner(first - 1) : -1;
  if (kept_by == rank && runner(first) != rank) turn.kept_to = runner(first);
  for (int64_t layer = first; layer < end; ++layer) {
    if (runner(layer) != rank) continue;
    turn.layer = layer;
    turn.position = static_cast<int>(layer - first);
    turn.sums = owners_[static_cast<size_t>(layer)] >= 0;
    turn.from = layer > first ? runner(layer - 1) : kept_by == rank ? -1 : kept_by;
    turn.to = layer + 1 < end ? runner(layer + 1) : -1;
  }
  return turn.layer || turn.kept_to >= 0 ? std::optional(turn) : std::nullopt;
}

bool LayerTurns::takes_part(int rank) const { return std::ranges::find(runners_, rank) != runners_.end(); }

}  // namespace w4q::pipeline
