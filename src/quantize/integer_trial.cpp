#include "quantize/integer_trial.h"

#include <algorithm>

#include "quantize/rtn.h"

namespace w4q::quantize {

GroupTrial::GroupTrial(const ErrorFactor& factor, int64_t position, int64_t columns)
    : pivots_(factor.pivots().subspan(static_cast<size_t>(position), static_cast<size_t>(columns))),
      effects_(static_cast<size_t>(columns * columns)),
      moved_(static_cast<size_t>(columns)) {
  const auto coupling = factor.coupling();
  for (int64_t to = 0; to < columns; ++to) {
    for (int64_t from = 0; from < to; ++from) {
      effects_[static_cast<size_t>(from * columns + to)] = coupling.row(position + to)[position + from];
    }
  }
}

formats::IntegerScale GroupTrial::best(const formats::Scheme& scheme, std::span<const float> targets,
                                       const float* weights, const Range& range) {
  formats::IntegerScale result = formats::integer_scale(scheme, range.low, range.high);
  if (range.low == range.high) return result;
  double least = round(scheme.bits, targets, weights, result);
  for (int step = 1; step < clip_steps; ++step) {
    const float share = clip_share(step);
    const auto scale = formats::integer_scale(scheme, range.low * share, range.high * share);
    const double found = round(scheme.bits, targets, weights, scale, nullptr, least);
    if (!(found < least)) continue;
    least = found;
    result = scale;
  }
  return result;
}

double GroupTrial::round(int bits, std::span<const float> targets, const float* weights,
                         const formats::IntegerScale& scale, uint8_t* codes, double limit) {
  std::ranges::copy(targets, moved_.begin());
  const size_t columns = targets.size();
  double sum = 0;
  for (size_t c = 0; c < columns; ++c) {
    const uint8_t code = formats::integer_code(moved_[c], scale.value, scale.zero, bits);
    const float value = static_cast<float>(static_cast<int>(code) - scale.zero) * scale.value;
    const double miss = static_cast<double>(moved_[c]) - static_cast<double>(value);
    sum += miss * miss * static_cast<double>(pivots_[c]);
    if (sum >= limit) return sum;
    if (codes != nullptr) codes[c] = code;
    const float residual = weights[c] - value;
    const float* effect = effects_.data() + c * columns;
    float* moved = moved_.data();
#pragma omp simd
    for (size_t later = c + 1; later < columns; ++later) moved[later] += effect[later] * residual;
  }
  return sum;
}

}  // namespace w4q::quantize
