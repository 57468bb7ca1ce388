#include "quantize/group_cuda.h"

#include "core/error.h"
#include "formats/integer.h"
#include "quantize/feedback.h"
#include "quantize/integer_rows_cuda.h"
#include "quantize/kbit.h"
#include "quantize/kbit_search_cuda.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {

using formats::SchemeFamily;

GroupCuda::Measured GroupCuda::add(const TensorView& weight, const formats::Scheme& scheme,
                                   const QuantizeOptions& options) {
  ensure(takes(scheme), "GroupCuda: no such scheme");
  Linear linear{.name = std::string(weight.name),
                .weight = upload_weight(work_, weight),
                .n = weight.shape[0],
                .k = weight.shape[1],
                .scheme = scheme,
                .clip = options.clip(),
                .table = {}};
  if (scheme.family == SchemeFamily::kbit) linear.table = chosen_table(scheme, options);
  linears_.push_back(std::move(linear));
  Linear& own = linears_.back();
  Measured measured;
  measured.power = gram_->error(own.weight.as<float>(), own.n);
  auto* const difference = work_.errors.get<float>(own.n * own.k);
  rounding_error_cuda(work_, view(own), own.k, nullptr, difference);
  measured.plain = gram_->error(difference, own.n);
  return measured;
}

AwqCudaLinear GroupCuda::view(Linear& linear) const {
  return {linear.weight.as<float>(), linear.n, linear.scheme, linear.clip, linear.table};
}

AwqScales GroupCuda::search(const AwqInput& input, double plain_error, const formats::InputRotation* rotation) {
  std::vector<AwqCudaLinear> views;
  for (Linear& linear : linears_) views.push_back(view(linear));
  if (rotation == nullptr) return search_scales_cuda(work_, views, input, *gram_, plain_error);
  const RotationCuda on_gpu(work_, *rotation);
  return search_scales_cuda(work_, views, input, *gram_, plain_error, &on_gpu);
}

void GroupCuda::scale(std::span<const float> scales) {
  gram_->divide(scales);
  const float* const device = work_.put(work_.columns, scales.data(), static_cast<int64_t>(scales.size()));
  for (Linear& linear : linears_) multiply_columns_cuda(work_, linear.weight.as<float>(), linear.n, linear.k, device);
}

void GroupCuda::rotate(const formats::InputRotation& rotation) {
  const RotationCuda on_gpu(work_, rotation);
  gram_->rotate(on_gpu);
  for (Linear& linear : linears_) on_gpu.rotate(work_, linear.weight.as<float>(), linear.n);
  work_.stream.synchronize();  // the factors go
}

const ErrorFactorCuda* GroupCuda::factor(const Linear& linear, const Steps& steps) {
  const Step* feedback = steps.find(StepKind::feedback);
  if (feedback == nullptr) return nullptr;
  const int64_t block = feedback_block(linear.scheme, linear.k);
  const auto known = factors_.find(block);
  if (known != factors_.end()) return &known->second;
  return &factors_.try_emplace(block, work_, *gram_, block, feedback->damping, linear.name).first->second;
}

double GroupCuda::damping(size_t index) const {
  const auto known = factors_.find(feedback_block(linears_[index].scheme, linears_[index].k));
  return known == factors_.end() ? 0 : known->second.damping();
}

GroupCuda::Packed GroupCuda::pack(size_t index, QuantizeOptions options, std::span<const float> row_scales) {
  Linear& linear = linears_.at(index);
  const ErrorFactorCuda* const feedback = factor(linear, options.steps);
  auto* const weight = linear.weight.as<float>();
  const float* original = weight;
  device::DeviceBuffer kept;
  const bool clips = options.steps.awq_clips();
  if (clips || !row_scales.empty()) {
    kept = device::DeviceBuffer(work_.context, linear.weight.size());
    device::copy(device::Way::on_gpu, kept.data(), weight, kept.size(), work_.stream, "copying weights");
    original = kept.as<float>();
  }
  if (clips) search_clip_cuda(work_, view(linear), *gram_);
  const float* rows = nullptr;
  if (!row_scales.empty()) {
    rows = work_.put(work_.rows, row_scales.data(), linear.n);
    divide_rows_cuda(work_, weight, linear.n, linear.k, rows);
  }
  const auto mean_squares = gram_->diagonal();
  const CalibratedInput input{mean_squares};
  options.input = &input;
  auto* const difference = work_.errors.get<float>(linear.n * linear.k);
  Packed packed;
  if (linear.scheme.family == SchemeFamily::kbit) {
    const KbitCudaWeight values{.name = linear.name,
                                .values = weight,
                                .n = linear.n,
                                .k = linear.k,
                                .factor = feedback,
                                .original = original,
                                .rows = rows,
                                .difference = difference};
    packed.result = kbit_cuda(work_, values, linear.scheme, options);
  } else {
    packed.result = QuantizeResult{formats::allocate_integer(linear.scheme, linear.n, linear.k), {}};
    packed.result.stats =
        integer_rows_cuda(work_, weight, feedback, options.clip(), original, rows, difference, packed.result.weight);
  }
  packed.error = gram_->error(difference, linear.n);
  linear.weight = device::DeviceBuffer();
  return packed;
}

}  // namespace w4q::quantize
