#include "formats/trellis_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/with_bits.h"

namespace w4q::formats {
namespace {

constexpr int seam = 48;
constexpr float never = std::numeric_limits<float>::infinity();

}  // namespace

void trellis_plain_step(int bits, int window, const float* least, const float* levels, float target, float* next) {
  const size_t groups = size_t{1} << (window - bits);
  with_bits<1, 2, 3, 4, 5, 6, 7, 8>(bits, [&]<int width>() {
    constexpr size_t ways = size_t{1} << width;
    for (size_t g = 0; g < groups; g += ways) {
      float best[ways];
      for (size_t way = 0; way < ways; ++way) {
        const float spent = least[way * (groups / ways) + g / ways];
        const float* const level = levels + way * groups + g;
        for (size_t symbol = 0; symbol < ways; ++symbol) {
          const float off = level[symbol] - target;
          const float cost = spent + off * off;
          best[symbol] = way == 0 ? cost : std::min(cost, best[symbol]);
        }
      }
      std::copy_n(best, ways, next + g);
    }
  });
}

TrellisSearch::TrellisSearch(std::vector<float> own_levels, const TrellisCodeView& code, TrellisStep step,
                             std::span<const float> step_levels)
    : own_levels_(std::move(own_levels)),
      bits_(code.bits),
      window_(code.window),
      step_(step),
      step_levels_(step_levels),
      levels_(own_levels_.empty() ? code.levels : std::span<const float>(own_levels_)),
      groups_(size_t{1} << (code.window - code.bits)),
      stride_(groups_ + trellis_overread),
      costs_(stride_ * static_cast<size_t>(code.length + 1)) {
  ensure(bits_ >= 1 && bits_ <= 8 && code.length >= 2 * seam && levels_.size() == size_t{1} << window_,
         "no such trellis");
}

TrellisSearch::TrellisSearch(const TrellisCodeView& code, TrellisStep step, std::span<const float> step_levels)
    : TrellisSearch(std::vector<float>{}, code, step, step_levels) {}

TrellisSearch::TrellisSearch(int bits, int window, TrellisStep step, std::span<const float> step_levels)
    : TrellisSearch(trellis_levels(window), {bits, window}, step, step_levels) {
  ensure(bits >= trellis_min_bits && bits <= trellis_max_bits && window >= trellis_min_window &&
             window <= trellis_max_window,
         "no such trellis");
}

void TrellisSearch::around(std::span<const Weight> ring, std::span<uint32_t> states) {
  std::array<Weight, 2 * seam> ends{};
  std::copy(ring.end() - seam, ring.end(), ends.begin());
  std::copy_n(ring.begin(), seam, ends.begin() + seam);
  run(ends, -1, -1, states.first(2 * seam));
  const uint32_t at_seam = states[seam - 1];
  run(ring, at_seam, at_seam, states);
}

void TrellisSearch::ring(std::span<const float> targets, std::span<uint32_t> states) {
  std::vector<Weight> weights(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    weights[i] = {Kind::counts, std::clamp(targets[i], -trellis_largest_target, trellis_largest_target)};
  }
  around(weights, states);
}

std::array<TrellisSearch::Weight, trellis_rows> TrellisSearch::ring_of(const TrellisColumn& column) const noexcept {
  std::array<Weight, trellis_rows> ring{};
  for (int row = 0; row < trellis_rows; ++row) ring[static_cast<size_t>(row)] = weight(column, row);
  if (column.weighed) exchange(column, ring);
  return ring;
}

TrellisSymbols TrellisSearch::operator()(const TrellisColumn& column, int seam, uint32_t state) {
  std::array<uint32_t, trellis_rows> states{};
  auto ring = ring_of(column);
  std::ranges::rotate(ring, ring.begin() + seam);
  run(ring, state, state, states);
  std::ranges::rotate(states, states.end() - seam);
  TrellisSymbols symbols{};
  for (size_t row = 0; row < static_cast<size_t>(column.rows); ++row) {
    symbols[row] = static_cast<uint8_t>(states[row] & ((1u << bits_) - 1));
  }
  return symbols;
}

TrellisSymbols TrellisSearch::operator()(const TrellisColumn& column) {
  std::array<uint32_t, trellis_rows> states{};
  const auto ring = ring_of(column);
  if ((trellis_rows - column.rows) * bits_ >= window_) {
    const auto rows = static_cast<size_t>(column.rows);
    run(std::span(ring).first(rows), 0, -1, std::span(states).first(rows));
  } else {
    around(ring, states);
  }
  TrellisSymbols symbols{};
  for (size_t row = 0; row < static_cast<size_t>(column.rows); ++row) {
    symbols[row] = static_cast<uint8_t>(states[row] & ((1u << bits_) - 1));
  }
  return symbols;
}

TrellisSearch::Weight TrellisSearch::weight(const TrellisColumn& column, int row) const noexcept {
  const auto at = static_cast<size_t>(row);
  if (row >= column.rows) return {Kind::zero, 0};
  if (!column.counts[at]) return {Kind::free, 0};
  return {Kind::counts, std::clamp(column.targets[at], -trellis_largest_target, trellis_largest_target)};
}

void TrellisSearch::exchange(const TrellisColumn& column, std::span<Weight> ring) noexcept {
  float largest = 0;
  for (size_t row = 0; row < ring.size(); ++row) {
    if (ring[row].kind == Kind::counts) largest = std::max(largest, column.importance[row]);
  }
  if (!(largest > 0)) return;
  const auto importance = [&](size_t row) {
    return std::max(column.importance[row], trellis_least_importance * largest);
  };
  float before = 0;  // of the last row that counts, whichever that is
  for (size_t row = ring.size(); before == 0; --row) {
    if (ring[row - 1].kind == Kind::counts) before = importance(row - 1);
  }
  for (size_t row = 0; row < ring.size(); ++row) {
    if (ring[row].kind != Kind::counts) continue;
    ring[row].exchange = before / importance(row);
    before = importance(row);
  }
}

float TrellisSearch::cost(Weight weight, uint32_t state) const noexcept {
  if (weight.kind == Kind::free) return 0;
  if (weight.kind == Kind::zero) return (state & ((1u << bits_) - 1)) == 0 ? 0 : never;
  const float off = levels_[state] - weight.target;
  return off * off;
}

void TrellisSearch::advance(Weight weight, const float* least, float* next) const {
  if (weight.kind == Kind::counts) return step_(bits_, window_, least, step_levels_.data(), weight.target, next);
  for (size_t g = 0; g < groups_; ++g) {
    float best = never;
    for (size_t way = 0; way < size_t{1} << bits_; ++way) {
      const auto state = static_cast<uint32_t>(way * groups_ + g);
      best = std::min(best, least[state >> bits_] + cost(weight, state));
    }
    next[g] = best;
  }
}

uint32_t TrellisSearch::cheapest(Weight weight, const float* least) const noexcept {
  uint32_t best = 0;
  float lowest = never;
  for (uint32_t state = 0; state < 1u << window_; ++state) {
    const float cost = least[state >> bits_] + this->cost(weight, state);
    if (cost < lowest) lowest = cost, best = state;
  }
  return best;
}

uint32_t TrellisSearch::predecessor(Weight weight, const float* least, uint32_t group) const noexcept {
  uint32_t best = group;
  float lowest = never;
  for (uint32_t way = 0; way < 1u << bits_; ++way) {
    const uint32_t state = way << (window_ - bits_) | group;
    const float cost = least[state >> bits_] + this->cost(weight, state);
    if (cost < lowest) lowest = cost, best = state;
  }
  return best;
}

void TrellisSearch::run(std::span<const Weight> path, int64_t start, int64_t end, std::span<uint32_t> states) {
  if (path.empty()) return;
  std::fill_n(costs(0), groups_, start < 0 ? 0.0f : never);
  if (start >= 0) costs(0)[static_cast<size_t>(start) % groups_] = 0;
  for (size_t step = 0; step + 1 < path.size(); ++step) {
    advance(path[step], costs(step), costs(step + 1));
    const float exchange = path[step + 1].exchange;
    if (exchange == 1) continue;
    float* const next = costs(step + 1);
    for (size_t g = 0; g < groups_; ++g) next[g] *= exchange;
  }
  size_t step = path.size() - 1;
  states[step] = end < 0 ? cheapest(path[step], costs(step)) : static_cast<uint32_t>(end);
  for (; step > 0; --step) {
    states[step - 1] = predecessor(path[step - 1], costs(step - 1), states[step] >> bits_);
  }
}

}  // namespace w4q::formats
