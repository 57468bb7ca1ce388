#include "quantize/group_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "formats/integer.h"
#include "formats/kbit.h"
#include "quantize/feedback.h"
#include "quantize/integer_rows_cuda.h"
#include "quantize/kbit.h"
#include "quantize/kbit_rows_cuda.h"
#include "quantize/kbit_search.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

using formats::SchemeFamily;

/// Rows that a learned table is made of, brought to the CPU: every stride-th.
std::vector<float> sample_rows(const CudaWork& work, const float* weight, int64_t n, int64_t k, int64_t stride) {
  const int64_t rows = (n + stride - 1) / stride;
  std::vector<float> values(static_cast<size_t>(rows * k));
  const auto row = static_cast<size_t>(k) * sizeof(float);
  device::check(cudaMemcpy2DAsync(values.data(), row, weight, row * static_cast<size_t>(stride), row,
                                  static_cast<size_t>(rows), cudaMemcpyDeviceToHost, work.stream.get()),
                "copying weights from the GPU");
  work.stream.synchronize();
  return values;
}

}  // namespace

GroupCuda::Measured GroupCuda::add(const TensorView& weight, const formats::Scheme& scheme,
                                   const QuantizeOptions& options) {
  ensure(takes(scheme), "GroupCuda: no such scheme");
  Linear linear{std::string(weight.name),
                upload_weight(work_, weight),
                weight.shape[0],
                weight.shape[1],
                scheme,
                options.clip,
                {}};
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

AwqScales GroupCuda::search(const AwqInput& input, double plain_error) {
  std::vector<AwqCudaLinear> views;
  for (Linear& linear : linears_) views.push_back(view(linear));
  return search_scales_cuda(work_, views, input, *gram_, plain_error);
}

void GroupCuda::scale(std::span<const float> scales) {
  gram_->divide(scales);
  const float* const device = work_.put(work_.columns, scales.data(), static_cast<int64_t>(scales.size()));
  for (Linear& linear : linears_) multiply_columns_cuda(work_, linear.weight.as<float>(), linear.n, linear.k, device);
}

const ErrorFactorCuda* GroupCuda::factor(const Linear& linear, const GroupPacking& packing) {
  if (!packing.feedback) return nullptr;
  const int64_t block = feedback_block(linear.scheme, linear.k);
  const auto known = factors_.find(block);
  if (known != factors_.end()) return &known->second;
  return &factors_.try_emplace(block, work_, *gram_, block, packing.damping, linear.name).first->second;
}

double GroupCuda::damping(size_t index) const {
  const auto known = factors_.find(feedback_block(linears_[index].scheme, linears_[index].k));
  return known == factors_.end() ? 0 : known->second.damping();
}

GroupCuda::Packed GroupCuda::pack(size_t index, QuantizeOptions options, const GroupPacking& packing) {
  Linear& linear = linears_.at(index);
  const ErrorFactorCuda* const feedback = factor(linear, packing);
  auto* const weight = linear.weight.as<float>();
  const float* original = weight;
  device::DeviceBuffer kept;
  if (packing.clip || !packing.rows.empty()) {
    kept = device::DeviceBuffer(linear.weight.size());
    device::check(cudaMemcpyAsync(kept.data(), weight, kept.size(), cudaMemcpyDeviceToDevice, work_.stream.get()),
                  "copying weights");
    original = kept.as<float>();
  }
  if (packing.clip) search_clip_cuda(work_, view(linear), *gram_);
  const float* rows = nullptr;
  if (!packing.rows.empty()) {
    rows = work_.put(work_.rows, packing.rows.data(), linear.n);
    divide_rows_cuda(work_, weight, linear.n, linear.k, rows);
  }
  const auto mean_squares = gram_->diagonal();
  const CalibratedInput input{mean_squares};
  options.input = &input;
  auto* const difference = work_.errors.get<float>(linear.n * linear.k);
  Packed packed;
  packed.result = linear.scheme.family == SchemeFamily::integer
                      ? pack_integer(linear, options, feedback, original, rows, difference)
                      : pack_kbit(linear, options, feedback, original, rows, difference);
  packed.error = gram_->error(difference, linear.n);
  linear.weight = device::DeviceBuffer();
  return packed;
}

QuantizeResult GroupCuda::pack_integer(const Linear& linear, const QuantizeOptions& options,
                                       const ErrorFactorCuda* factor, const float* original, const float* rows,
                                       float* difference) {
  QuantizeResult result{formats::allocate_integer(linear.scheme, linear.n, linear.k), {}};
  result.stats = integer_rows_cuda(work_, linear.weight.as<float>(), factor, options.clip, original, rows, difference,
                                   result.weight);
  return result;
}

QuantizeResult GroupCuda::pack_kbit(const Linear& linear, const QuantizeOptions& options, const ErrorFactorCuda* factor,
                                    const float* original, const float* rows, float* difference) {
  const auto* const weight = linear.weight.as<float>();
  const BlockExtremes extremes = block_extremes_cuda(work_, weight, linear.n, linear.k);
  const BlockMaxima maxima{{}, extremes.smallest, extremes.largest};
  const auto importance = channel_importance(options, linear.k);
  const bool searches = options.searches() || factor != nullptr;
  std::vector<float> table = linear.table;
  if (options.learn_table) {
    const int64_t stride = learning_stride(linear.n, linear.k);
    const auto sample = sample_rows(work_, weight, linear.n, linear.k, stride);
    const TensorView view{linear.name, DType::f32, {(linear.n + stride - 1) / stride, linear.k}, bytes_of(sample)};
    table = final_table(view, linear.scheme, maxima, importance, options);
  }
  const int exponent = searches ? searched_range_exponent(maxima, linear.scheme.scale)
                                : formats::kbit_range_exponent(maxima.smallest, maxima.largest, linear.scheme.scale);
  const TensorView shape{linear.name, DType::f32, {linear.n, linear.k}, {}};
  QuantizeResult result{allocate_canonical(shape, linear.scheme, formats::kbit_scaled_codebook(table, exponent)), {}};
  result.stats =
      kbit_rows_cuda(work_, weight, importance, factor, options.scales, original, rows, difference, result.weight);
  result.stats.range_exponent = exponent;
  return result;
}

}  // namespace w4q::quantize
