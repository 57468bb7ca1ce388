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

std::vector<std::vector<size_t>> MixProblem::groups() const {
  if (!ties.empty()) return ties;
  std::vector<std::vector<size_t>> alone;
  for (size_t i = 0; i < items.size(); ++i) alone.push_back({i});
  return alone;
}

Mix cheapest_mix(const MixProblem& problem, const MixCosts& costs, int64_t limit) {
  const auto groups = problem.groups();
  std::vector<std::vector<quantize::AllocationChoice>> choices(groups.size());
  for (size_t g = 0; g < choices.size(); ++g) {
    choices[g].resize(costs[groups[g].front()].size());
    for (const size_t i : groups[g]) {
      const double least = std::ranges::min(costs[i]);
      for (size_t c = 0; c < choices[g].size(); ++c) {
        choices[g][c].bytes += problem.bytes[i][c];
        choices[g][c].cost += costs[i][c] - least;
      }
    }
  }
  const quantize::AllocationFrontier frontier(std::move(choices));
  for (int64_t room = limit;;) {
    const auto chosen = frontier.choose(room);
    if (chosen.empty()) return {};
    Mix mix(problem.items.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const size_t i : groups[g]) mix[i] = chosen[g];
    }
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
  const auto groups = problem.groups();
  std::vector<Mix> result;
  for (const bool backwards : {false, true}) {
    Mix mix = least;
    int64_t size = problem.size(mix);
    for (size_t n = 0; n < groups.size(); ++n) {
      const auto& group = groups[backwards ? groups.size() - 1 - n : n];
      int64_t more = 0;
      for (const size_t i : group) {
        more += problem.bytes[i][*lower + 1] + problem.tables[i][*lower + 1] - problem.bytes[i][*lower] -
                problem.tables[i][*lower];
      }
      if (size + more > limit) continue;
      size += more;
      for (const size_t i : group) ++mix[i];
    }
    result.push_back(std::move(mix));
  }
  return result;
}

std::vector<MixExchange> promising_exchanges(const MixProblem& problem, const MixCosts& effects, const Mix& mix,
                                             int64_t limit, size_t count) {
  const int64_t room = limit - problem.size(mix);
  const auto groups = problem.groups();
  const auto choice_of = [&](size_t g) { return mix[groups[g].front()]; };
  const auto grows = [&](size_t g, size_t to) {
    int64_t sum = 0;
    for (const size_t i : groups[g]) {
      sum += problem.bytes[i][to] + problem.tables[i][to] - problem.bytes[i][mix[i]] - problem.tables[i][mix[i]];
    }
    return sum;
  };
  const auto change = [&](size_t g, size_t to) {
    double sum = 0;
    for (const size_t i : groups[g]) sum += effects[i][to] - effects[i][mix[i]];
    return sum;
  };
  const auto move = [&](MixExchange& exchange, size_t g, size_t to) {
    for (const size_t i : groups[g]) exchange.changes.emplace_back(i, to);
    exchange.promised += change(g, to);
  };
  std::vector<MixExchange> result;
  for (size_t up = 0; up < groups.size(); ++up) {
    if (choice_of(up) + 1 >= problem.items[groups[up].front()].choices()) continue;
    const size_t to = choice_of(up) + 1;
    const int64_t needed = grows(up, to) - room;
    // Who gives: one alone, or those that lose least for their bytes until it is enough.
    std::vector<size_t> givers;
    for (size_t g = 0; g < groups.size(); ++g) {
      if (g != up && choice_of(g) > 0) givers.push_back(g);
    }
    std::ranges::sort(givers, {}, [&](size_t g) {
      return std::pair(change(g, choice_of(g) - 1) / static_cast<double>(-grows(g, choice_of(g) - 1)), g);
    });
    MixExchange several;
    move(several, up, to);
    if (needed <= 0) result.push_back(several);
    int64_t given = 0;
    size_t giving = 0;
    for (const size_t g : givers) {
      const size_t down = choice_of(g) - 1;
      if (-grows(g, down) >= needed && needed > 0) {
        MixExchange pair;
        move(pair, up, to);
        move(pair, g, down);
        result.push_back(std::move(pair));
      }
      if (given >= needed) continue;
      given -= grows(g, down);
      ++giving;
      move(several, g, down);
    }
    if (giving > 1 && given >= needed) result.push_back(std::move(several));
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
