#include <algorithm>
#include <cmath>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Beyond all others of its tensor by this much: a bit of its exponent has turned.
constexpr float least_step = 1000;
constexpr int64_t least_values = 64;

struct Extremes {
  int64_t non_finite = -1;        ///< the first
  float largest = 0, second = 0;  ///< magnitudes
  int64_t at = -1, zeros = 0;     ///< of the largest; how many are zero

  void add(const Extremes& other) {
    if (other.non_finite >= 0) non_finite = non_finite < 0 ? other.non_finite : std::min(non_finite, other.non_finite);
    zeros += other.zeros;
    second = std::max({std::min(largest, other.largest), second, other.second});
    if (other.largest > largest) largest = other.largest, at = other.at;
  }
};

Extremes extremes_of(std::span<const float> values, int64_t begin) {
  Extremes result;
  for (size_t i = 0; i < values.size(); ++i) {
    const float size = std::abs(values[i]);
    result.zeros += size == 0;
    if (size <= result.second) continue;
    if (!std::isfinite(size)) {
      if (result.non_finite < 0) result.non_finite = begin + static_cast<int64_t>(i);
    } else if (size > result.largest) {
      result.second = std::exchange(result.largest, size), result.at = begin + static_cast<int64_t>(i);
    } else {
      result.second = size;
    }
  }
  // What compares with nothing.
  const auto nan = std::ranges::find_if(values, [](float value) { return std::isnan(value); });
  if (nan != values.end()) {
    const int64_t index = begin + (nan - values.begin());
    result.non_finite = result.non_finite < 0 ? index : std::min(result.non_finite, index);
  }
  return result;
}

Extremes extremes_of(const TensorView& tensor) {
  const int64_t count = element_count(tensor.shape);
  const int64_t width = dtype_bits(tensor.dtype) / 8;
  Extremes all;
  std::mutex mutex;
  parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(end - begin));
    widen(tensor.bytes.subspan(static_cast<size_t>(begin * width)), tensor.dtype, values);
    const Extremes found = extremes_of(values, begin);
    const std::scoped_lock lock(mutex);
    all.add(found);
  });
  return all;
}

/// Empty: nothing is wrong with it.
std::string fault_of(const TensorView& tensor) {
  const Extremes found = extremes_of(tensor);
  const int64_t count = element_count(tensor.shape);
  if (found.non_finite >= 0) return concat("NaN or infinity at element ", found.non_finite);
  if (count < least_values || 2 * found.zeros > count || !(found.second > 0)) return {};
  if (found.largest < least_step * found.second) return {};
  return concat("element ", found.at, " is of size ", found.largest, ", all others at most ", found.second,
                ": a bit of its exponent has turned");
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
