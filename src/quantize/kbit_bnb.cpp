// bitsandbytes' rule for kbit, byte for byte (docs/kbit.md).
#include <algorithm>
#include <bit>
#include <cmath>

#include "formats/codebook.h"
#include "formats/e4m4.h"
#include "quantize/kbit_encoder.h"

namespace w4q::quantize {
namespace {

/// Values are divided by the exact absmax; the stored scale is rounded on its own and may wrap.
struct ExactAbsmax {
  formats::StoredScale operator()(float absmax) const noexcept {
    return {formats::e4m4_encode_bnb(absmax), std::max(absmax, 1e-8f), absmax > formats::e4m4_max};
  }
};

/// Floats in their order as integers; ±0 share one.
int64_t order_of(float value) noexcept {
  const auto magnitude = static_cast<int64_t>(std::bit_cast<uint32_t>(value) & 0x7FFFFFFF);
  return std::signbit(value) ? -magnitude : magnitude;
}

float from_order(int64_t order) noexcept {
  const float magnitude = std::bit_cast<float>(static_cast<uint32_t>(std::abs(order)));
  return order < 0 ? -magnitude : magnitude;
}

/// The largest x that goes to `low` and not to `high`. The rule takes the entry at the least fp32 distance, the lower
/// one of two equals; both rounded distances are monotonic in x, so there is exactly one such place. It need not be the
/// rounded midpoint.
float last_of(float low, float high) noexcept {
  int64_t taken = order_of(low);
  int64_t given = order_of(high);
  while (given - taken > 1) {
    const int64_t middle = taken + (given - taken) / 2;
    const float x = from_order(middle);
    (std::abs(x - high) < std::abs(x - low) ? given : taken) = middle;
  }
  return from_order(taken);
}

}  // namespace

QuantizeResult quantize_bnb(const TensorView& weight, const formats::Scheme& scheme, const BlockMaxima& maxima) {
  const std::vector<float> table = formats::codebook("nf-quantile", scheme.bits);
  std::vector<float> thresholds;
  for (size_t i = 1; i < table.size(); ++i) thresholds.push_back(last_of(table[i - 1], table[i]));
  QuantizeResult result{allocate_canonical(weight, scheme, table), {}};
  const KbitSearch search(thresholds);
  result.stats = KbitEncoder(weight, maxima, search, ExactAbsmax{}, result.weight).encode();
  return result;
}

}  // namespace w4q::quantize
