#include "kernels/sampling/logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/text.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/logits_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h, once per target.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;

/// Vectors added up in fp32 before their sum moves on to fp64.
constexpr size_t stretch = 32;

float row_maximum(const float* x, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  float result = x[0];
  size_t i = 0;
  if (count >= lanes) {
    auto largest = hn::LoadU(d, x);
    for (i = lanes; i + lanes <= count; i += lanes) largest = hn::Max(largest, hn::LoadU(d, x + i));
    result = hn::GetLane(hn::MaxOfLanes(d, largest));
  }
  for (; i < count; ++i) result = std::max(result, x[i]);
  return result;
}

/// Σ term(i) over vectors of a row; the tail is padded with `padding`, whose terms are 0.
template <class Term>
HWY_INLINE double sum_terms(size_t count, const Term& term) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  double total = 0;
  size_t i = 0;
  while (i + lanes <= count) {
    auto sum = hn::Zero(d);
    for (size_t v = 0; v < stretch && i + lanes <= count; ++v, i += lanes) sum = hn::Add(sum, term(i, lanes));
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  if (i < count) total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, term(i, count - i))));
  return total;
}

/// Σ e^(x[i] − shift).
double sum_exponentials(const float* x, size_t count, float shift) {
  const Tag d;
  const auto shifts = hn::Set(d, shift);
  return sum_terms(count, [&](size_t i, size_t n) HWY_ATTR {
    const auto mask = hn::FirstN(d, n);
    const auto value = n == hn::Lanes(d) ? hn::LoadU(d, x + i) : hn::MaskedLoad(mask, d, x + i);
    return hn::IfThenElseZero(mask, hn::Exp(d, hn::Sub(value, shifts)));
  });
}

/// Σ e^(a[i] − shift)·(a[i] − b[i] − offset).
double sum_divergence(const float* a, const float* b, size_t count, float shift, float offset) {
  const Tag d;
  const auto shifts = hn::Set(d, shift), offsets = hn::Set(d, offset);
  return sum_terms(count, [&](size_t i, size_t n) HWY_ATTR {
    const auto mask = hn::FirstN(d, n);
    const bool whole = n == hn::Lanes(d);
    const auto base = whole ? hn::LoadU(d, a + i) : hn::MaskedLoad(mask, d, a + i);
    const auto other = whole ? hn::LoadU(d, b + i) : hn::MaskedLoad(mask, d, b + i);
    const auto difference = hn::Sub(hn::Sub(base, other), offsets);
    return hn::IfThenElseZero(mask, hn::Mul(hn::Exp(d, hn::Sub(base, shifts)), difference));
  });
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(row_maximum);
HWY_EXPORT(sum_exponentials);
HWY_EXPORT(sum_divergence);

void check_id(std::span<const float> row, int64_t id) {
  if (id >= 0 && id < static_cast<int64_t>(row.size())) return;
  throw Error(ErrorCode::bad_argument, concat("token id ", id, " is outside the vocabulary of ", row.size()));
}

}  // namespace

double log_sum_exp(std::span<const float> row) noexcept {
  const float shift = HWY_DYNAMIC_DISPATCH(row_maximum)(row.data(), row.size());
  return shift + std::log(HWY_DYNAMIC_DISPATCH(sum_exponentials)(row.data(), row.size(), shift));
}

double log_softmax_at(std::span<const float> row, int64_t id) {
  check_id(row, id);
  return row[static_cast<size_t>(id)] - log_sum_exp(row);
}

int64_t argmax(std::span<const float> row) noexcept {
  if (row.empty()) return -1;
  const float largest = HWY_DYNAMIC_DISPATCH(row_maximum)(row.data(), row.size());
  const auto found = std::find(row.begin(), row.end(), largest);
  return found == row.end() ? 0 : found - row.begin();  // not found: only NaN
}

std::array<int64_t, 5> top_five(std::span<const float> row) noexcept {
  std::array<int64_t, 5> best;
  best.fill(-1);
  std::array<float, 5> values;
  values.fill(-std::numeric_limits<float>::infinity());
  size_t held = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    if (held == best.size() && !(row[i] > values.back())) continue;
    size_t place = std::min(held, best.size() - 1);
    for (; place > 0 && row[i] > values[place - 1]; --place) {
      values[place] = values[place - 1];
      best[place] = best[place - 1];
    }
    values[place] = row[i];
    best[place] = static_cast<int64_t>(i);
    held = std::min(held + 1, best.size());
  }
  return best;
}

LogitComparison compare_logits(std::span<const float> a, std::span<const float> b, int64_t id) {
  ensure(a.size() == b.size() && !a.empty(), "compare_logits: rows of different length");
  check_id(a, id);
  const float shift = HWY_DYNAMIC_DISPATCH(row_maximum)(a.data(), a.size());
  const double sum = HWY_DYNAMIC_DISPATCH(sum_exponentials)(a.data(), a.size(), shift);
  const double lse_a = shift + std::log(sum), lse_b = log_sum_exp(b);
  LogitComparison result;
  result.nll_a = lse_a - a[static_cast<size_t>(id)];
  result.nll_b = lse_b - b[static_cast<size_t>(id)];
  // Most of the difference between the normalizers leaves the sum before it can cancel; what fp32 rounds off it stays.
  const auto offset = static_cast<float>(lse_a - lse_b);
  const double divergence = HWY_DYNAMIC_DISPATCH(sum_divergence)(a.data(), b.data(), a.size(), shift, offset);
  result.kl = divergence / sum + (static_cast<double>(offset) - (lse_a - lse_b));
  const auto top_a = top_five(a), top_b = top_five(b);
  result.same_top1 = top_a[0] == top_b[0];
  for (const int64_t entry : top_a) result.top5_overlap += entry >= 0 && std::ranges::count(top_b, entry) > 0 ? 1 : 0;
  return result;
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
