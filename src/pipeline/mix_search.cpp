#include "pipeline/mix_search.h"

#include <algorithm>
#include <optional>
#include <set>

#include "core/error.h"
#include "quantize/allocation.h"

namespace w4q::pipeline {
namespace {

Mix uniform(const MixProblem& problem, size_t choice) { return Mix(problem.items.size(), choice); }

class Search {
 public:
  Search(MixMeter& meter, const MixProblem& problem, int64_t limit, const std::function<void()>& on_try)
      : meter_(meter), problem_(problem), limit_(limit), on_try_(on_try) {}

  MixChoice run(const std::vector<Mix>& proposals, int64_t tries) {
    const auto neighbours = neighbour_mixes(problem_, limit_);
    ensure(!neighbours.empty(), "search_mix: nothing is as small");
    for (const Mix& mix : neighbours) consider(mix);
    result_.neighbour_divergence = result_.divergence;
    result_.base = uniform(problem_, std::ranges::max(neighbours.front()));
    result_.base_divergence = measure(result_.base);
    meter_.accept();
    result_.effects = meter_.effects();
    consider(cheapest_mix(problem_, result_.effects, limit_));
    for (const Mix& mix : proposals) consider(mix);
    measure(result_.mix);
    meter_.accept();
    exchange(tries);
    result_.neighbour = std::ranges::find(neighbours, result_.mix) != neighbours.end();
    return std::move(result_);
  }

 private:
  double measure(const Mix& mix) {
    measured_.insert(mix);
    const double divergence = meter_.measure(mix);
    if (on_try_) on_try_();
    return divergence;
  }

  bool consider(const Mix& mix) {
    if (measured_.contains(mix)) return false;
    const double divergence = measure(mix);
    if (!result_.mix.empty() && divergence >= result_.divergence) return false;
    result_.mix = mix;
    result_.divergence = divergence;
    return true;
  }

  void exchange(int64_t tries) {
    while (result_.exchanges_tried < tries) {
      // More than are left to try: some may have been measured before.
      const auto list =
          promising_exchanges(problem_, result_.effects, result_.mix, limit_, static_cast<size_t>(2 * tries));
      const bool helped = std::ranges::any_of(list, [&](const MixExchange& exchange) {
        Mix mix = result_.mix;
        for (const auto& [item, choice] : exchange.changes) mix[item] = choice;
        if (result_.exchanges_tried == tries || measured_.contains(mix)) return false;
        ++result_.exchanges_tried;
        return consider(mix);
      });
      if (!helped) return;
      ++result_.exchanges_taken;
      meter_.accept();
    }
  }

  MixMeter& meter_;
  const MixProblem& problem_;
  const int64_t limit_;
  const std::function<void()>& on_try_;
  std::set<Mix> measured_;
  MixChoice result_;
};

}  // namespace

int64_t MixProblem::size(const Mix& mix) const {
  int64_t sum = 0;
  for (size_t i = 0; i < mix.size(); ++i) sum += bytes[i][mix[i]] + tables[i][mix[i]];
  return sum;
}

Mix cheapest_mix(const MixProblem& problem, const MixCosts& costs, int64_t limit) {
  std::vector<std::vector<quantize::AllocationChoice>> choices(problem.items.size());
  for (size_t i = 0; i < choices.size(); ++i) {
    const double least = std::ranges::min(costs[i]);
    for (size_t c = 0; c < costs[i].size(); ++c) choices[i].push_back({problem.bytes[i][c], costs[i][c] - least});
  }
  const quantize::AllocationFrontier frontier(std::move(choices));
  for (int64_t room = limit;;) {
    Mix mix = frontier.choose(room);
    if (mix.empty()) return mix;
    const int64_t size = problem.size(mix);
    if (size <= limit) return mix;
    room -= size - limit;
  }
}

std::vector<Mix> neighbour_mixes(const MixProblem& problem, int64_t limit) {
  const size_t last = problem.items.front().choices() - 1;
  std::optional<size_t> lower;
  for (size_t choice = 0; choice <= last; ++choice) {
    if (problem.size(uniform(problem, choice)) <= limit) lower = choice;
  }
  if (!lower) return {};
  const Mix least = uniform(problem, *lower);
  if (*lower == last || problem.size(least) == limit) return {least};
  std::vector<Mix> result;
  for (const bool backwards : {false, true}) {
    Mix mix = least;
    int64_t size = problem.size(mix);
    for (size_t n = 0; n < mix.size(); ++n) {
      const size_t i = backwards ? mix.size() - 1 - n : n;
      const int64_t more = problem.bytes[i][*lower + 1] + problem.tables[i][*lower + 1] - problem.bytes[i][*lower] -
                           problem.tables[i][*lower];
      if (size + more > limit) continue;
      size += more;
      ++mix[i];
    }
    result.push_back(std::move(mix));
  }
  return result;
}

std::vector<MixExchange> promising_exchanges(const MixProblem& problem, const MixCosts& effects, const Mix& mix,
                                             int64_t limit, size_t count) {
  const int64_t room = limit - problem.size(mix);
  const auto grows = [&](size_t i, size_t to) {
    return problem.bytes[i][to] + problem.tables[i][to] - problem.bytes[i][mix[i]] - problem.tables[i][mix[i]];
  };
  const auto change = [&](size_t i, size_t to) { return effects[i][to] - effects[i][mix[i]]; };
  std::vector<MixExchange> result;
  for (size_t up = 0; up < mix.size(); ++up) {
    if (mix[up] + 1 >= problem.items[up].choices()) continue;
    const size_t to = mix[up] + 1;
    const int64_t needed = grows(up, to) - room;
    // Who gives: one alone, or those that lose least for their bytes until it is enough.
    std::vector<size_t> givers;
    for (size_t i = 0; i < mix.size(); ++i) {
      if (i != up && mix[i] > 0) givers.push_back(i);
    }
    std::ranges::sort(givers, {}, [&](size_t i) {
      return std::pair(change(i, mix[i] - 1) / static_cast<double>(-grows(i, mix[i] - 1)), i);
    });
    if (needed <= 0) result.push_back({{{up, to}}, change(up, to)});
    MixExchange several{{{up, to}}, change(up, to)};
    int64_t given = 0;
    for (const size_t i : givers) {
      const size_t down = mix[i] - 1;
      if (-grows(i, down) >= needed && needed > 0) {
        result.push_back({{{up, to}, {i, down}}, change(up, to) + change(i, down)});
      }
      if (given >= needed) continue;
      given -= grows(i, down);
      several.changes.emplace_back(i, down);
      several.promised += change(i, down);
    }
    if (several.changes.size() > 2 && given >= needed) result.push_back(std::move(several));
  }
  std::ranges::stable_sort(result, {}, &MixExchange::promised);
  if (result.size() > count) result.resize(count);
  return result;
}

MixChoice search_mix(MixMeter& meter, const MixProblem& problem, int64_t limit, const std::vector<Mix>& proposals,
                     int64_t tries, const std::function<void()>& on_try) {
  return Search(meter, problem, limit, on_try).run(proposals, tries);
}

}  // namespace w4q::pipeline
