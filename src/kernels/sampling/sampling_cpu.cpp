#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/text.h"
#include "kernels/sampling/logits.h"

namespace w4q::kernels {
namespace {

struct Candidate {
  int32_t id;
  float logit;
  double probability;  ///< not normalized
};

/// The kept tokens of the top_k rule in descending order, with e^((logit − largest) / temperature).
std::vector<Candidate> candidates(std::span<const float> logits, const SamplingOptions& options) {
  std::vector<Candidate> kept(logits.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    // NaN, which has no place in an order, comes last.
    const float logit = std::isnan(logits[i]) ? -std::numeric_limits<float>::infinity() : logits[i];
    kept[i] = {static_cast<int32_t>(i), logit, 0};
  }
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  const auto wanted = options.top_k > 0 ? std::min(kept.size(), static_cast<size_t>(options.top_k)) : kept.size();
  std::partial_sort(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(wanted), kept.end(), before);
  kept.resize(wanted);
  const double largest = kept.front().logit;
  for (auto& candidate : kept) candidate.probability = std::exp((candidate.logit - largest) / options.temperature);
  return kept;
}

double total(const std::vector<Candidate>& kept) {
  double sum = 0;
  for (const auto& candidate : kept) sum += candidate.probability;
  return sum;
}

void keep_top_p(std::vector<Candidate>& kept, double top_p) {
  const double limit = top_p * total(kept);
  double sum = 0;
  size_t count = 0;
  while (count < kept.size() && (count == 0 || sum < limit)) sum += kept[count++].probability;
  kept.resize(count);
}

void keep_min_p(std::vector<Candidate>& kept, double min_p) {
  const double limit = min_p * kept.front().probability;
  std::erase_if(kept, [&](const Candidate& candidate) { return candidate.probability < limit; });
}

}  // namespace

void check_sampling(const SamplingOptions& options) {
  const auto require = [](bool condition, std::string_view name, double value, std::string_view range) {
    if (condition) return;
    throw Error(ErrorCode::bad_argument, concat(name, " ", value, " is out of range"))
        .detail(concat("expected ", range));
  };
  require(std::isfinite(options.temperature) && options.temperature >= 0, "temperature", options.temperature,
          "0 or more");
  require(options.top_k >= 0, "top-k", options.top_k, "0 or more");
  require(options.top_p > 0 && options.top_p <= 1, "top-p", options.top_p, "more than 0, at most 1");
  require(options.min_p >= 0 && options.min_p <= 1, "min-p", options.min_p, "0 to 1");
}

int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t draw) {
  ensure(!logits.empty(), "sample: no logits");
  if (options.temperature == 0 || options.top_k == 1) return static_cast<int32_t>(argmax(logits));
  std::vector<Candidate> kept = candidates(logits, options);
  if (options.top_p < 1) keep_top_p(kept, options.top_p);
  if (options.min_p > 0) keep_min_p(kept, options.min_p);
  double left = random_uniform(options.seed, draw) * total(kept);
  for (const auto& candidate : kept) {
    left -= candidate.probability;
    if (left < 0) return candidate.id;
  }
  return kept.back().id;
}

}  // namespace w4q::kernels
