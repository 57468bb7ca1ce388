#include "quantize/kbit_search_cuda.h"

#include <vector>

#include "formats/kbit.h"
#include "quantize/kbit.h"
#include "quantize/kbit_rows_cuda.h"
#include "quantize/kbit_search.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

/// The rows that tables are learned from, brought to the CPU.
std::vector<float> sample_rows(const CudaWork& work, const KbitCudaWeight& weight) {
  const int64_t stride = learning_stride(weight.n, weight.k);
  const int64_t rows = (weight.n + stride - 1) / stride;
  std::vector<float> values(static_cast<size_t>(rows * weight.k));
  const auto row = static_cast<size_t>(weight.k) * sizeof(float);
  device::copy_rows(device::Way::from_gpu, {values.data(), row}, {weight.values, row * static_cast<size_t>(stride)},
                    row, static_cast<size_t>(rows), work.stream, "copying weights from the GPU");
  work.stream.synchronize();
  return values;
}

TensorView view_of(const KbitCudaWeight& weight, const std::vector<float>& sample) {
  return {weight.name, DType::f32, {static_cast<int64_t>(sample.size()) / weight.k, weight.k}, bytes_of(sample)};
}

std::vector<float> table_of(const CudaWork& work, const KbitCudaWeight& weight, const formats::Scheme& scheme,
                            const BlockMaxima& maxima, const std::vector<float>& importance,
                            const QuantizeOptions& options) {
  if (!options.learns_table() || options.tensor_factor > 0) return chosen_table(scheme, options);
  const auto sample = sample_rows(work, weight);
  return final_table(view_of(weight, sample), scheme, maxima, importance, options);
}

}  // namespace

SharedTable shared_table_cuda(CudaWork& work, std::span<const KbitCudaWeight> weights, const formats::Scheme& scheme,
                              float room, const QuantizeOptions& options) {
  BlockMaxima maxima;
  std::vector<std::vector<float>> samples;
  std::vector<TensorView> views;
  for (const KbitCudaWeight& weight : weights) {
    const BlockExtremes extremes = block_extremes_cuda(work, weight.values, weight.n, weight.k);
    join_extremes(maxima, extremes.smallest, extremes.largest * room);
    samples.push_back(sample_rows(work, weight));
    views.push_back(view_of(weight, samples.back()));
  }
  return learn_shared_table(views, scheme, maxima, channel_importance(options, weights.front().k), options);
}

QuantizeResult kbit_cuda(CudaWork& work, const KbitCudaWeight& weight, const formats::Scheme& scheme,
                         const QuantizeOptions& options) {
  const BlockExtremes extremes = block_extremes_cuda(work, weight.values, weight.n, weight.k);
  const BlockMaxima maxima{{}, extremes.smallest, extremes.largest};
  const auto importance = channel_importance(options, weight.k);
  const auto table = table_of(work, weight, scheme, maxima, importance, options);
  const bool searches = options.searches() || weight.feedback.factor != nullptr;
  const int exponent = searches ? table_exponent(maxima, scheme.scale, options)
                                : formats::kbit_range_exponent(maxima.smallest, maxima.largest, scheme.scale);
  const TensorView shape{weight.name, DType::f32, {weight.n, weight.k}, {}};
  QuantizeResult result{allocate_canonical(shape, scheme, formats::kbit_scaled_codebook(table, exponent)), {}};
  result.stats = kbit_rows_cuda(work, weight.values, importance, weight.feedback, options.scales(), weight.original,
                                weight.rows, weight.difference, result.weight);
  result.stats.range_exponent = exponent;
  return result;
}

QuantizeResult quantize_searched_cuda(const TensorView& weight, const formats::Scheme& scheme,
                                      const QuantizeOptions& options, device::Context& gpu) {
  CudaWork work(gpu);
  const auto values = upload_weight(work, weight);
  const KbitCudaWeight on_gpu{
      .name = weight.name, .values = values.as<float>(), .n = weight.shape[0], .k = weight.shape[1]};
  return kbit_cuda(work, on_gpu, scheme, options);
}

}  // namespace w4q::quantize
