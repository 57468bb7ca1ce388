#include "quantize/passes.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/dequantize/dequantize.h"
#include "quantize/rtn.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::InputRotation;
using formats::Rotation;

Rotation own_rotation(const formats::Scheme& scheme, std::optional<uint64_t> seed) {
  if (scheme.family != formats::SchemeFamily::rotated) return {};
  return {scheme.block, seed};
}

/// What is still to be quantized, in the basis of the latest rotation.
class Remainder {
 public:
  explicit Remainder(const TensorView& weight)
      : weight_(weight),
        name_(weight.name),
        n_(weight.shape[0]),
        k_(weight.shape[1]),
        values_(static_cast<size_t>(n_ * k_)) {
    int64_t bad_row = n_;
    std::mutex mutex;
    each_row([&](int64_t row, std::span<float> values) {
      widen(row_bytes(weight, row), weight.dtype, values);
      if (std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) return;
      const std::lock_guard lock(mutex);
      bad_row = std::min(bad_row, row);
    });
    // Once rotated, the column would be any of the block.
    if (bad_row < n_) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, bad_row), bad_row);
  }

  TensorView view() const { return {name_, DType::f32, {n_, k_}, bytes_of(values_)}; }

  void turn(const InputRotation& rotation) {
    if (rotation.rotation() == rotation_.rotation()) return;
    int64_t bad_row = n_;
    std::mutex mutex;
    each_row([&](int64_t row, std::span<float> values) {
      rotation_.restore(values);
      rotation.rotate(values);
      if (std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) return;
      const std::lock_guard lock(mutex);
      bad_row = std::min(bad_row, row);
    });
    if (bad_row < n_) refuse_too_large(bad_row);
    rotation_ = rotation;
  }

  void subtract(const formats::PackedWeight& pass) {
    parallel_for(n_, row_grain(k_), [&](int64_t begin, int64_t end) {
      std::vector<float> decoded(static_cast<size_t>(k_));
      for (int64_t row = begin; row < end; ++row) {
        kernels::dequantize_rows(pass, row, MatrixView<float>(decoded.data(), 1, k_));
        const std::span<float> values = this->row(row);
        for (size_t i = 0; i < values.size(); ++i) values[i] -= decoded[i];
      }
    });
  }

 private:
  std::span<float> row(int64_t index) {
    return std::span(values_).subspan(static_cast<size_t>(index * k_), static_cast<size_t>(k_));
  }

  template <class Body>
  void each_row(Body&& body) {
    parallel_for(n_, row_grain(k_), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) body(index, row(index));
    });
  }

  /// Finite values whose sums in the other basis are not.
  [[noreturn]] void refuse_too_large(int64_t row) {
    widen(row_bytes(weight_, row), weight_.dtype, this->row(row));
    const auto largest = std::ranges::max_element(this->row(row), {}, [](float value) { return std::abs(value); });
    throw Error(ErrorCode::bad_file, concat(printable(name_), ": too large to be rotated"))
        .detail(concat(*largest, " at row ", row, ", column ", largest - this->row(row).begin(),
                       ": its sums with others are beyond fp32"))
        .hint("keep this tensor at 16 bit (--keep), or choose a scheme that rotates nothing");
  }

  const TensorView& weight_;
  std::string_view name_;
  int64_t n_, k_;
  std::vector<float> values_;
  InputRotation rotation_{Rotation{}, k_};
};

}  // namespace

std::vector<Pass> plan_passes(const formats::Scheme& first, std::span<const formats::Scheme> further,
                              const RotationChoice& choice) {
  std::vector<Pass> passes{{first, choice.first.identity() ? own_rotation(first, choice.seed) : choice.first}};
  uint64_t seed = choice.residual_seed;
  for (const formats::Scheme& scheme : further) {
    const bool shares = choice.shared && !passes.front().rotation.identity();
    passes.push_back({scheme, shares ? passes.front().rotation : own_rotation(scheme, seed)});
    seed += 1000;
  }
  return passes;
}

QuantizeOptions options_of_pass(const QuantizeOptions& options, const formats::Scheme& first,
                                const formats::Scheme& scheme) {
  if (scheme.family == first.family) return options;
  QuantizeOptions result;
  result.steps = options.steps.without(&StepRow::of_quantizer);
  result.input = options.input;
  return result;
}

PassesResult quantize_passes(const TensorView& weight, std::span<const Pass> passes, const QuantizePass& quantize) {
  ensure(!passes.empty(), "quantize_passes: no pass");
  check_weight(weight);
  PassesResult result;
  result.linear.source_dtype = weight.dtype;
  Remainder remainder(weight);
  const bool rotates = std::ranges::any_of(passes, [](const Pass& pass) { return !pass.rotation.identity(); });
  for (const Pass& pass : passes) {
    InputRotation rotation(pass.rotation, weight.shape[1]);
    remainder.turn(rotation);
    QuantizeResult quantized = quantize(remainder.view(), pass.scheme);
    if (result.linear.passes.empty()) result.stats.range_exponent = quantized.stats.range_exponent;
    add(quantized.stats, result.stats);
    result.linear.passes.push_back(std::move(quantized.weight));
    if (rotates) result.linear.rotations.push_back(std::move(rotation));
    if (result.linear.passes.size() < passes.size()) remainder.subtract(result.linear.passes.back());
  }
  return result;
}

}  // namespace w4q::quantize
