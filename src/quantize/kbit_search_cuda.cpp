#include "quantize/kbit_search_cuda.h"

#include <functional>
#include <vector>

#include "formats/kbit.h"
#include "quantize/kbit.h"
#include "quantize/kbit_rows_cuda.h"
#include "quantize/kbit_search.h"
#include "quantize/table_sums_cuda.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

std::vector<float> table_of(CudaWork& work, const KbitCudaWeight& weight, const formats::Scheme& scheme,
                            const BlockMaxima& maxima, const std::vector<float>& importance,
                            const QuantizeOptions& options) {
  if (!options.learns_table() || options.tensor_factor > 0) return chosen_table(scheme, options);
  const TableSumsCuda::Weight sampled{weight.values, weight.n, weight.k};
  const TableSumsCuda sums(work, {&sampled, 1}, scheme, importance, options.scales());
  return final_table(scheme, maxima, options, std::cref(sums));
}

}  // namespace

SharedTable shared_table_cuda(CudaWork& work, std::span<const KbitCudaWeight> weights, const formats::Scheme& scheme,
                              float room, const QuantizeOptions& options) {
  BlockMaxima maxima;
  std::vector<TableSumsCuda::Weight> sampled;
  for (const KbitCudaWeight& weight : weights) {
    const BlockExtremes extremes = block_extremes_cuda(work, weight.values, weight.n, weight.k);
    join_extremes(maxima, extremes.smallest, extremes.largest * room);
    sampled.push_back({weight.values, weight.n, weight.k});
  }
  const auto importance = channel_importance(options, weights.front().k);
  const TableSumsCuda sums(work, sampled, scheme, importance, options.scales());
  return learn_shared_table(scheme, maxima, options, std::cref(sums));
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
