#include "quantize/allocation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace w4q::quantize {
namespace {

constexpr double impossible = std::numeric_limits<double>::infinity();
constexpr size_t most_choices = 255;

void check(const std::vector<std::vector<AllocationChoice>>& items) {
  for (const auto& choices : items) {
    ensure(!choices.empty() && choices.size() <= most_choices, "allocation: an item without choices");
    for (const auto& choice : choices) {
      ensure(choice.bytes >= 0 && choice.cost >= 0 && std::isfinite(choice.cost), "allocation: no size or cost");
    }
  }
}

int64_t smallest_of(const std::vector<AllocationChoice>& choices) {
  return std::ranges::min(choices, {}, &AllocationChoice::bytes).bytes;
}

int64_t largest_of(const std::vector<AllocationChoice>& choices) {
  return std::ranges::max(choices, {}, &AllocationChoice::bytes).bytes;
}

}  // namespace

AllocationFrontier::AllocationFrontier(std::vector<std::vector<AllocationChoice>> items, int64_t most_cells)
    : items_(std::move(items)) {
  check(items_);
  int64_t range = 0, divisor = 0;
  for (const auto& choices : items_) {
    smallest_ += smallest_of(choices);
    range += largest_of(choices) - smallest_of(choices);
    for (const auto& choice : choices) divisor = std::gcd(divisor, choice.bytes - smallest_of(choices));
  }
  const auto count = static_cast<int64_t>(items_.size());
  unit_ = std::max<int64_t>(1, divisor);
  // Rounding up adds at most one unit for every item.
  while (count * (range / unit_ + count + 1) > most_cells) unit_ *= 2;

  int64_t sizes = 1;
  for (const auto& choices : items_) {
    auto& steps = steps_.emplace_back();
    for (const auto& choice : choices) steps.push_back((choice.bytes - smallest_of(choices) + unit_ - 1) / unit_);
    sizes += std::ranges::max(steps);
  }
  cost_.assign(static_cast<size_t>(sizes), impossible);
  cost_[0] = 0;
  taken_.resize(items_.size() * cost_.size());
  std::vector<double> next(cost_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    std::ranges::fill(next, impossible);
    uint8_t* taken = taken_.data() + i * cost_.size();
    for (size_t choice = 0; choice < items_[i].size(); ++choice) {
      const auto step = static_cast<size_t>(steps_[i][choice]);
      const double cost = items_[i][choice].cost;
      for (size_t size = step; size < next.size(); ++size) {
        const double sum = cost_[size - step] + cost;
        if (!(sum < next[size])) continue;
        next[size] = sum;
        taken[size] = static_cast<uint8_t>(choice);
      }
    }
    cost_.swap(next);
  }
}

std::vector<size_t> AllocationFrontier::choose(int64_t bytes) const {
  if (bytes < smallest_) return {};
  const auto room = std::min((bytes - smallest_) / unit_, static_cast<int64_t>(cost_.size()) - 1);
  const auto best = std::min_element(cost_.begin(), cost_.begin() + room + 1);
  auto size = static_cast<size_t>(best - cost_.begin());
  std::vector<size_t> result(items_.size());
  for (size_t i = items_.size(); i-- > 0;) {
    result[i] = taken_[i * cost_.size() + size];
    size -= static_cast<size_t>(steps_[i][result[i]]);
  }
  return result;
}

AllocationFrontier::Point AllocationFrontier::point(const std::vector<size_t>& choices) const {
  Point result;
  for (size_t i = 0; i < choices.size(); ++i) {
    result.bytes += items_[i][choices[i]].bytes;
    result.cost += items_[i][choices[i]].cost;
  }
  return result;
}

}  // namespace w4q::quantize
