#include "pipeline/calibrated_passes.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/stopwatch.h"
#include "kernels/dequantize/dequantize.h"
#include "pipeline/rotated_weight.h"
#include "pipeline/shared_factor.h"
#include "quantize/asymmetric.h"
#include "quantize/feedback.h"
#include "quantize/norm_calibration.h"
#include "quantize/rounding.h"
#include "quantize/rtn.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;

void subtract(const formats::PackedWeight& pass, MatrixView<float> rest) {
  parallel_for(rest.rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> decoded(static_cast<size_t>(rest.cols));
    for (int64_t r = begin; r < end; ++r) {
      kernels::dequantize_rows(pass, r, {decoded.data(), 1, rest.cols});
      float* row = rest.row(r);
      for (int64_t c = 0; c < rest.cols; ++c) row[c] -= decoded[static_cast<size_t>(c)];
    }
  });
}

}  // namespace

std::vector<float> diagonal(MatrixView<const float> matrix) {
  std::vector<float> result(static_cast<size_t>(matrix.rows));
  for (int64_t i = 0; i < matrix.rows; ++i) result[static_cast<size_t>(i)] = matrix.row(i)[i];
  return result;
}

CalibratedPasses::CalibratedPasses(MatrixView<float> gram, const quantize::QuantizeOptions& options, std::string group)
    : gram_(gram), rotation_({}, gram.rows), options_(options), group_(std::move(group)) {}

void CalibratedPasses::turn(const formats::InputRotation& rotation) {
  if (rotation.rotation() == rotation_.rotation()) return;
  if (!rotation_.rotation().identity()) {
    restore_gram(gram_, rotation_);
    if (drift_.rows > 0) restore_products(drift_, rotation_);
  }
  if (!rotation.rotation().identity()) {
    rotate_gram(gram_, rotation);
    if (drift_.rows > 0) rotate_products(drift_, rotation);
  }
  rotation_ = rotation;
}

void CalibratedPasses::aim(MatrixView<float> weight, const formats::Scheme& scheme, int bits) {
  if (drift_.rows == 0) return;
  const double mean = quantize::mean_diagonal(diagonal(gram_), group_);
  quantize::follow_inputs(weight, drift_, factor(quantize::feedback_block(scheme, weight.cols)), mean,
                          quantize::move_limit(bits, drift_tokens_, weight.cols));
}

void CalibratedPasses::add_first(PassWork& work, const formats::Scheme& scheme, const Values& weight) {
  auto options = with_shared_table(options_, tables_, scheme);
  if (has_tensor_factor(scheme)) options.tensor_factor = tensor_factor_;
  add(work, scheme, weight, options);
}

void CalibratedPasses::add_further(PassWork& work, const quantize::Pass& pass) {
  const Stopwatch watch;
  formats::PackedLinear& linear = work.packed.linear;
  const int64_t k = work.rest.shape[1];
  const formats::InputRotation rotation(pass.rotation, k);
  // Rotations stand with all passes or with none.
  const formats::InputRotation before =
      linear.rotations.empty() ? formats::InputRotation({}, k) : linear.rotations.back();
  if (before.rotation() != rotation.rotation()) {
    restore_rows(work.rest.matrix(), before);
    rotate_rows(work.rest.matrix(), rotation);
    if (linear.rotations.empty()) linear.rotations.assign(linear.passes.size(), before);
  }
  turn(rotation);
  add(work, pass.scheme, work.rest, quantize::options_of_pass(options_, linear.passes.front().scheme, pass.scheme));
  work.packed.seconds += watch.seconds();
}

void CalibratedPasses::add(PassWork& work, const formats::Scheme& scheme, const Values& weight,
                           quantize::QuantizeOptions options) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const auto mean_squares = diagonal(gram_);
  quantize::CalibratedInput input{.mean_squares = mean_squares, .gram = gram_};
  if (options_.steps.has(StepKind::feedback)) input.feedback = &factor(quantize::feedback_block(scheme, k));
  if (!work.output_costs.empty() && quantize::step_row(StepKind::feedback_outputs).accepts(scheme, nullptr)) {
    input.output_gram = {work.output_costs.data(), n, n};
    input.outputs = &factor_outputs(work, input.output_gram, quantize::output_block(scheme));
  }
  options.input = &input;
  const TensorView view{weight.name, DType::f32, weight.shape, bytes_of(weight.values)};
  auto quantized = quantize::rounding_quantizer(scheme).run(view, scheme, options);
  if (options_.steps.has(StepKind::fit_norms) && quantize::step_row(StepKind::fit_norms).accepts(scheme, nullptr)) {
    quantize::calibrate_norms(quantized.weight, {weight.values.data(), n, k}, gram_, quantize::norm_damping);
  }
  formats::PackedLinear& linear = work.packed.linear;
  if (linear.passes.empty()) work.packed.stats.range_exponent = quantized.stats.range_exponent;
  quantize::add(quantized.stats, work.packed.stats);
  if (!rotation_.rotation().identity() || !linear.rotations.empty()) linear.rotations.push_back(rotation_);
  linear.passes.push_back(std::move(quantized.weight));
  subtract(linear.passes.back(), work.rest.matrix());
}

const quantize::ErrorFactor& CalibratedPasses::factor_outputs(PassWork& work, MatrixView<const float> costs,
                                                              int64_t block) const {
  if (!work.outputs || work.outputs->block() != block) {
    work.outputs.emplace(costs, block, options_.steps.find(StepKind::feedback)->damping, work.name);
  }
  return *work.outputs;
}

const quantize::ErrorFactor& CalibratedPasses::factor(int64_t block) {
  const auto key = std::pair(to_string(rotation_.rotation()), block);
  const auto known = factors_.find(key);
  if (known != factors_.end()) return known->second;
  const quantize::Step* const feedback = options_.steps.find(StepKind::feedback);
  const double damping = feedback == nullptr ? quantize::Step{}.damping : feedback->damping;
  const auto& made = factors_.try_emplace(key, gram_, block, damping, group_).first->second;
  damping_ = std::max(damping_, made.damping());
  return made;
}

}  // namespace w4q::pipeline
