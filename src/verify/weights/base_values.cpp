#include "verify/weights/base_values.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/convert.h"
#include "core/interrupt.h"

namespace w4q::verify {
namespace {

constexpr int64_t piece = int64_t{1} << 20;

/// values ← what a type holds of them.
void round_to(DType dtype, std::vector<float>& values) {
  std::vector<std::byte> rounded(values.size() * static_cast<size_t>(dtype_bits(dtype) / 8));
  narrow(values, dtype, rounded);
  widen(rounded, dtype, values);
}

/// What a program may do to values that it keeps: `type` is what it computes in, `offset` what it adds before and takes off
/// behind.
struct KeptThrough {
  DType type;
  float offset = 0;

  void take(std::vector<float>& values) const {
    round_to(type, values);
    if (offset == 0) return;
    for (const float by : {offset, -offset}) {
      for (float& value : values) value += by;
      round_to(type, values);
    }
  }
};

/// The first value that is neither the base's nor that rounded on its way to the type of `ours`; −1: none. Equal shapes.
int64_t first_difference(const TensorView& ours, const TensorView& theirs, const KeptThrough& through) {
  const int64_t count = element_count(ours.shape);
  for (int64_t begin = 0; begin < count; begin += piece) {
    check_interrupt();
    const int64_t end = std::min(begin + piece, count);
    const auto a = values_of(ours, begin, end);
    auto b = values_of(theirs, begin, end);
    through.take(b);
    if (through.type != ours.dtype) round_to(ours.dtype, b);
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) return begin + static_cast<int64_t>(i);
    }
  }
  return -1;
}

}  // namespace

std::vector<float> values_of(const TensorView& tensor, int64_t begin, int64_t end) {
  std::vector<float> values(static_cast<size_t>(end - begin));
  widen(tensor.bytes.subspan(static_cast<size_t>(begin * dtype_bits(tensor.dtype) / 8)), tensor.dtype, values);
  return values;
}

int64_t first_difference(const TensorView& ours, const TensorView& theirs) {
  return first_difference(ours, theirs, {ours.dtype});
}

bool hold_same_values(const TensorView& ours, const TensorView& theirs, float offset) {
  if (first_difference(ours, theirs) < 0) return true;
  const auto holds = [&](const KeptThrough& through) { return first_difference(ours, theirs, through) < 0; };
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (ours.dtype == DType::f32 && holds({dtype})) return true;
    if (offset != 0 && holds({dtype, offset})) return true;
  }
  return false;
}

bool holds_base_values(const model::OpenedModel& candidate, const model::OpenedModel& base, const std::string& name,
                       float offset) {
  if (!candidate.folder.tensors.contains(name) || !base.folder.tensors.contains(name)) return false;
  const auto ours = candidate.folder.tensors.load(name), theirs = base.folder.tensors.load(name);
  return ours->shape == theirs->shape && hold_same_values(ours.view(), theirs.view(), offset);
}

bool holds_base_values(const model::OpenedModel& candidate, const model::OpenedModel& base,
                       const model::PlannedNorm& norm) {
  return holds_base_values(candidate, base, norm.name + ".weight", norm.offset);
}

}  // namespace w4q::verify
