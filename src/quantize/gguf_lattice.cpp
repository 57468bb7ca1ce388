#include "quantize/gguf_lattice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/gguf_forms.h"
#include "quantize/lattice_simd.h"

namespace w4q::quantize {
namespace {

using formats::lattice_block;
using formats::lattice_scales;

/// Scales that are tried first, over that under which the largest magnitude has the highest level.
constexpr std::array<float, lattice_scales> shares{0.45f, 0.52f, 0.58f, 0.64f, 0.7f,  0.76f, 0.82f, 0.88f,
                                                   0.94f, 1,     1.07f, 1.15f, 1.25f, 1.4f,  1.72f, 2.14f};
/// The unit of a block is fitted to its points so often at most.
constexpr int most_rounds = 3;
/// The largest scale of a block is tried as this one and all above.
constexpr int least_top = 8;

float stored_unit(float d) { return formats::gguf_unit(formats::GgufUnit::f16, d); }

}  // namespace

LatticeSearch::LatticeSearch(const formats::GgufLattice& lattice)
    : lattice_(lattice),
      points_(lattice.points.size()),
      levels_(static_cast<size_t>(lattice.width) * points_),
      cross_(static_cast<size_t>(lattice.groups()) * points_),
      self_(cross_.size()) {
  for (int i = 0; i < lattice.width; ++i) {
    for (size_t p = 0; p < points_; ++p) {
      levels_[static_cast<size_t>(i) * points_ + p] = lattice.level(static_cast<int>(p), i);
    }
  }
}

/// Magnitudes and signs. Where the number of signs must be even, the weight whose sign counts least has the other one.
void LatticeSearch::take_magnitudes(const float* values, const float* importance) {
  for (size_t octet = 0; octet < 32; ++octet) {
    uint32_t signs = 0;
    size_t least = 8 * octet;
    int negative = 0;
    const auto energy = [&](size_t c) { return importance[c] * values[c] * values[c]; };
    for (size_t c = 8 * octet; c < 8 * octet + 8; ++c) {
      magnitudes_[c] = std::abs(values[c]);
      if (values[c] < 0) signs |= 1u << (c % 8), ++negative;
      if (energy(c) < energy(least)) least = c;
    }
    if (lattice_.even_signs && negative % 2 != 0) {
      signs ^= 1u << (least % 8);
      magnitudes_[least] = -magnitudes_[least];
    }
    block_.signs[octet] = static_cast<uint8_t>(signs);
  }
}

void LatticeSearch::sum_points(const float* importance) {
  std::ranges::fill(cross_, 0.0f);
  std::ranges::fill(self_, 0.0f);
  for (size_t c = 0; c < lattice_block; ++c) {
    const auto width = static_cast<size_t>(lattice_.width);
    const float* const levels = levels_.data() + c % width * points_;
    const float weight = importance[c];
    add_levels(levels, points_, weight * magnitudes_[c], weight, cross_.data() + c / width * points_,
               self_.data() + c / width * points_);
  }
}

/// The points of a part, of `all` or of likely ones, under each of sixteen scales, and which of these has the least error.
double LatticeSearch::best_points(int part, const Lanes& scales, bool all, int& lane) {
  const int per_part = lattice_.part / lattice_.width;
  std::array<double, lattice_scales> totals{};
  for (int g = part * per_part; g < (part + 1) * per_part; ++g) {
    const auto at = static_cast<size_t>(g);
    Lanes errors{};
    nearest_points({.cross = cross_.data() + at * points_,
                    .self = self_.data() + at * points_,
                    .codes = all ? nullptr : likely_[at].data(),
                    .count = all ? points_ : likely_[at].size()},
                   scales.data(), errors.data(), nearest_[at].data());
    for (size_t s = 0; s < lattice_scales; ++s) totals[s] += double{errors[s]};
  }
  lane = static_cast<int>(std::ranges::min_element(totals) - totals.begin());
  return totals[static_cast<size_t>(lane)];
}

/// The scale that is best for the points of a lane; where none is positive, the one that was tried.
float LatticeSearch::refined(int part, int lane, float scale) const {
  const int per_part = lattice_.part / lattice_.width;
  double cross = 0, self = 0;
  for (int g = part * per_part; g < (part + 1) * per_part; ++g) {
    const size_t at = static_cast<size_t>(g) * points_ + nearest_[static_cast<size_t>(g)][static_cast<size_t>(lane)];
    cross += double{cross_[at]}, self += double{self_[at]};
  }
  return cross > 0 && self > 0 ? static_cast<float>(cross / self) : scale;
}

void LatticeSearch::keep_nearest(int part) {
  const int per_part = lattice_.part / lattice_.width;
  for (int g = part * per_part; g < (part + 1) * per_part; ++g) {
    auto& likely = likely_[static_cast<size_t>(g)];
    const auto& nearest = nearest_[static_cast<size_t>(g)];
    likely.assign(nearest.begin(), nearest.end());
    std::ranges::sort(likely);
    likely.erase(std::ranges::unique(likely).begin(), likely.end());
  }
}

/// The largest scale that a part wants; 0: all values are. Makes the lists of likely points.
float LatticeSearch::free_scale() {
  float largest = 0;
  for (int part = 0; part < lattice_.parts(); ++part) {
    float most = 0;
    for (int c = part * lattice_.part; c < (part + 1) * lattice_.part; ++c) {
      most = std::max(most, std::abs(magnitudes_[static_cast<size_t>(c)]));
    }
    Lanes scales{};
    for (size_t s = 0; s < lattice_scales; ++s) {
      scales[s] = most / lattice_.levels.back() * shares[s];
    }
    int lane = 0;
    best_points(part, scales, true, lane);
    keep_nearest(part);
    if (most == 0) continue;
    largest = std::max(largest, refined(part, lane, scales[static_cast<size_t>(lane)]));
  }
  return largest;
}

/// The best scales and points under a unit.
LatticeSearch::Choice LatticeSearch::under(float d) {
  Choice choice{0, block_};
  choice.block.d = d;
  Lanes scales{};
  for (int s = 0; s < lattice_scales; ++s) scales[static_cast<size_t>(s)] = d * lattice_.multiple(s);
  const int per_part = lattice_.part / lattice_.width;
  for (int part = 0; part < lattice_.parts(); ++part) {
    int lane = 0;
    choice.error += best_points(part, scales, false, lane);
    choice.block.scales[static_cast<size_t>(part)] = static_cast<uint8_t>(lane);
    for (int g = part * per_part; g < (part + 1) * per_part; ++g) {
      choice.block.points[static_cast<size_t>(g)] = nearest_[static_cast<size_t>(g)][static_cast<size_t>(lane)];
    }
  }
  return choice;
}

/// Least squares of the unit under these scales and points.
float LatticeSearch::fitted(const Choice& choice) const {
  const int per_part = lattice_.part / lattice_.width;
  double cross = 0, self = 0;
  for (int g = 0; g < lattice_.groups(); ++g) {
    const double multiple = lattice_.multiple(choice.block.scales[static_cast<size_t>(g / per_part)]);
    const size_t at = static_cast<size_t>(g) * points_ + choice.block.points[static_cast<size_t>(g)];
    cross += multiple * double{cross_[at]}, self += multiple * multiple * double{self_[at]};
  }
  return cross > 0 ? static_cast<float>(cross / self) : choice.block.d;
}

/// From a unit on, fitted to what was chosen under it while the error falls.
LatticeSearch::Choice LatticeSearch::searched(float d) {
  Choice best = under(stored_unit(d));
  for (int round = 0; round < most_rounds; ++round) {
    const float next_d = stored_unit(fitted(best));
    if (next_d == best.block.d) break;
    Choice next = under(next_d);
    if (next.error >= best.error) break;
    best = next;
  }
  return best;
}

/// The nearest of all points under the scales that were chosen.
void LatticeSearch::take_nearest_of_all(Choice& choice) {
  const int per_part = lattice_.part / lattice_.width;
  choice.error = 0;
  for (int g = 0; g < lattice_.groups(); ++g) {
    const float scale = choice.block.d * lattice_.multiple(choice.block.scales[static_cast<size_t>(g / per_part)]);
    const float* const cross = cross_.data() + static_cast<size_t>(g) * points_;
    const float* const self = self_.data() + static_cast<size_t>(g) * points_;
    float best = std::numeric_limits<float>::max();
    for (size_t p = 0; p < points_; ++p) {
      const float error = scale * (scale * self[p]) - 2 * scale * cross[p];
      if (error >= best) continue;
      best = error;
      choice.block.points[static_cast<size_t>(g)] = static_cast<uint16_t>(p);
    }
    choice.error += double{best};
  }
}

const formats::LatticeBlock& LatticeSearch::run(const float* values, const float* importance) {
  block_ = {};
  take_magnitudes(values, importance);
  sum_points(importance);
  const float largest = free_scale();
  if (largest == 0) return block_;
  Choice best;
  for (int top = lattice_scales - 1; top >= least_top; --top) {
    Choice next = searched(largest / lattice_.multiple(top));
    if (top == lattice_scales - 1 || next.error < best.error) best = next;
  }
  take_nearest_of_all(best);
  Choice fine = best;
  fine.block.d = stored_unit(fitted(best));
  if (fine.block.d != best.block.d) {
    take_nearest_of_all(fine);
    if (fine.error < best.error) best = fine;
  }
  block_ = best.block;
  return block_;
}

void LatticeSearch::decode(float* values) const {
  for (int c = 0; c < lattice_block; ++c) {
    const auto at = static_cast<size_t>(c);
    const float scale = block_.d * lattice_.multiple(block_.scales[at / static_cast<size_t>(lattice_.part)]);
    const float magnitude =
        scale * lattice_.level(block_.points[at / static_cast<size_t>(lattice_.width)], c % lattice_.width);
    values[at] = block_.signs[at / 8] >> (at % 8) & 1 ? -magnitude : magnitude;
  }
}

}  // namespace w4q::quantize
