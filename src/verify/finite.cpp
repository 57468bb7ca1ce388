#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <span>
#include <vector>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/measure.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Beyond all others of its tensor by this much: a bit of its exponent has turned.
constexpr float least_step = 1000;
constexpr int64_t least_values = 64;

constexpr int64_t chunk_values = 1 << 16;

struct Extremes {
  int64_t non_finite = -1;        ///< the first
  float largest = 0, second = 0;  ///< magnitudes
  int64_t chunk = 0, zeros = 0;   ///< where the largest is; how many are zero

  void add(const Extremes& other) {
    if (other.non_finite >= 0) non_finite = non_finite < 0 ? other.non_finite : std::min(non_finite, other.non_finite);
    zeros += other.zeros;
    second = std::max({std::min(largest, other.largest), second, other.second});
    if (other.largest > largest) largest = other.largest, chunk = other.chunk;
  }
};

/// Values of `tensor` from `begin` on, as many as there is room for.
void widen_from(const TensorView& tensor, int64_t begin, std::span<float> values) {
  const int64_t width = dtype_bits(tensor.dtype) / 8;
  widen(tensor.bytes.subspan(static_cast<size_t>(begin * width)), tensor.dtype, values);
}

Extremes extremes_of(std::span<const float> values, int64_t begin) {
  const Magnitudes found = magnitudes_of(values);
  if (found.finite) return {-1, found.largest, found.second, begin, found.zeros};
  const auto first = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  return {begin + (first - values.begin()), 0, 0, begin, found.zeros};
}

Extremes extremes_of(const TensorView& tensor) {
  Extremes all;
  std::mutex mutex;
  parallel_for(element_count(tensor.shape), chunk_values, [&](int64_t begin, int64_t end) {
    std::array<float, chunk_values / 16> values;  // stays in the nearest cache
    Extremes found;
    for (int64_t at = begin; at < end; at += static_cast<int64_t>(values.size())) {
      const auto part = std::span(values).first(std::min(values.size(), static_cast<size_t>(end - at)));
      widen_from(tensor, at, part);
      found.add(extremes_of(part, at));
    }
    found.chunk = begin;
    const std::scoped_lock lock(mutex);
    all.add(found);
  });
  return all;
}

/// The first value of this magnitude in the chunk where it is.
int64_t place_of(const TensorView& tensor, const Extremes& found) {
  std::vector<float> values(static_cast<size_t>(std::min(chunk_values, element_count(tensor.shape) - found.chunk)));
  widen_from(tensor, found.chunk, values);
  const auto first = std::ranges::find(values, found.largest, [](float value) { return std::abs(value); });
  return found.chunk + (first - values.begin());
}

/// Empty: nothing is wrong with it.
std::string fault_of(const TensorView& tensor) {
  const Extremes found = extremes_of(tensor);
  const int64_t count = element_count(tensor.shape);
  if (found.non_finite >= 0) return concat("NaN or infinity at element ", found.non_finite);
  if (count < least_values || 2 * found.zeros > count || !(found.second > 0)) return {};
  if (found.largest < least_step * found.second) return {};
  return concat("element ", place_of(tensor, found), " is of size ", found.largest, ", all others at most ",
                found.second, ": a bit of its exponent has turned");
}

}  // namespace

Check check_finite(const model::OpenedModel& candidate) {
  Check check{"finite", true, {}, {}};
  int64_t checked = 0;
  for (const auto& parameter : model::parameters(candidate)) {
    check_interrupt();
    if (!candidate.folder.tensors.contains(parameter.name)) continue;
    const auto tensor = candidate.folder.tensors.load(parameter.name);
    if (!is_weight_dtype(tensor->dtype)) continue;
    ++checked;
    if (const auto fault = fault_of(tensor.view()); !fault.empty()) {
      check.faults.push_back(concat(printable(parameter.name), ": ", fault));
    }
  }
  check.passed = check.faults.empty();
  check.detail =
      concat(checked - static_cast<int64_t>(check.faults.size()), " of ", checked, " 16-bit tensors are finite");
  return check;
}

CheckRow finite_check() {
  return {
      .name = "finite",
      .help = "no NaN or infinity in any 16-bit tensor",
      .stops = true,
      .run = [](CheckContext& context, Findings& findings) { findings.checks.add(check_finite(context.candidate())); }};
}

}  // namespace w4q::verify
