#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Index of the first value that is not finite, or -1.
int64_t first_non_finite(const TensorView& tensor) {
  const int64_t count = element_count(tensor.shape);
  const int64_t width = dtype_bits(tensor.dtype) / 8;
  std::atomic<int64_t> first{count};
  parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(end - begin));
    widen(tensor.bytes.subspan(static_cast<size_t>(begin * width)), tensor.dtype, values);
    const auto found = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (found == values.end()) return;
    const int64_t index = begin + (found - values.begin());
    for (int64_t seen = first; index < seen && !first.compare_exchange_weak(seen, index);) {
    }
  });
  return first == count ? -1 : first.load();
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
    const int64_t index = first_non_finite(tensor.view());
    if (index >= 0) check.faults.push_back(concat(printable(parameter.name), ": NaN or infinity at element ", index));
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
