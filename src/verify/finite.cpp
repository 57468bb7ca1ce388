#include <algorithm>
#include <cmath>
#include <mutex>
#include <span>
#include <vector>

#include "core/interrupt.h"
#include "core/measure.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Beyond all others of its tensor by this much: a bit of its exponent has turned.
constexpr float least_step = 1000;
/// Of norms and biases, into whose channels scales of 10^4 are folded one by one.
constexpr float least_step_of_vectors = 1e5f;
constexpr int64_t least_values = 64;
/// Text and other bytes that are no numbers are far larger, read as numbers of 16 bits.
constexpr float largest_of_any = 1e7f;

constexpr int64_t values_at_a_time = 1 << 16;

struct Extremes {
  int64_t non_finite = -1;        ///< the first
  float largest = 0, second = 0;  ///< magnitudes
  int64_t row = 0, zeros = 0;     ///< where the largest is; how many are zero

  void add(const Extremes& other) {
    if (other.non_finite >= 0) non_finite = non_finite < 0 ? other.non_finite : std::min(non_finite, other.non_finite);
    zeros += other.zeros;
    second = std::max({std::min(largest, other.largest), second, other.second});
    if (other.largest > largest) largest = other.largest, row = other.row;
  }
};

Extremes extremes_of(std::span<const float> values, int64_t row) {
  const Magnitudes found = magnitudes_of(values);
  if (found.finite) return {-1, found.largest, found.second, row, found.zeros};
  const auto first = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  return {row * std::ssize(values) + (first - values.begin()), 0, 0, row, found.zeros};
}

Extremes extremes_of(const io::RowReader& read, int64_t count, int64_t k) {
  Extremes all;
  std::mutex mutex;
  parallel_for(count / k, std::max<int64_t>(values_at_a_time / k, 1), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(k));
    Extremes found;
    for (int64_t row = begin; row < end; ++row) {
      read(row, values);
      found.add(extremes_of(values, row));
    }
    const std::scoped_lock lock(mutex);
    all.add(found);
  });
  return all;
}

/// The first value of this magnitude in the row where it is.
int64_t place_of(const io::RowReader& read, const Extremes& found, int64_t k) {
  std::vector<float> values(static_cast<size_t>(k));
  read(found.row, values);
  const auto first = std::ranges::find(values, found.largest, [](float value) { return std::abs(value); });
  return found.row * k + (first - values.begin());
}

/// Empty: nothing is wrong with it.
std::string fault_of(const io::RowReader& read, const Shape& shape) {
  const int64_t count = element_count(shape), k = shape.empty() ? 1 : std::max<int64_t>(shape.back(), 1);
  const Extremes found = extremes_of(read, count, k);
  if (found.non_finite >= 0) return concat("NaN or infinity at element ", found.non_finite);
  if (count >= least_values && found.largest > largest_of_any) {
    return concat("element ", place_of(read, found, k), " is of size ", found.largest, ": no parameter of a trained ",
                  "model is larger than ", largest_of_any);
  }
  if (count < least_values || 2 * found.zeros > count || !(found.second > 0)) return {};
  if (found.largest < (shape.size() > 1 ? least_step : least_step_of_vectors) * found.second) return {};
  return concat("element ", place_of(read, found, k), " is of size ", found.largest, ", all others at most ",
                found.second, ": a bit of its exponent has turned");
}

}  // namespace

Check check_finite(const model::OpenedModel& candidate) {
  Check check{"finite", true, {}, {}};
  const io::Checkpoint& tensors = candidate.folder.tensors;
  int64_t checked = 0;
  for (const auto& parameter : model::parameters(candidate)) {
    check_interrupt();
    if (!tensors.contains(parameter.name)) continue;
    const io::TensorInfo& info = tensors.at(parameter.name);
    if (!is_weight_dtype(info.dtype)) continue;
    ++checked;
    if (const auto fault = fault_of(tensors.rows(parameter.name), info.shape); !fault.empty()) {
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
