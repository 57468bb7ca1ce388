#include "verify/products/product_kernels_cuda.h"

#include <algorithm>
#include <set>

#include "kernels/linear/int8_rows.h"
#include "kernels/linear/kernel_row.h"

namespace w4q::verify {

using decoder_cuda::CudaLinear;
using decoder_cuda::CudaProduct;

namespace {

constexpr int64_t most_rows = 2048;

}  // namespace

std::vector<std::string> kernel_names(const CudaProduct& product, int64_t rows, bool int8) {
  std::vector<std::string> names;
  for (const auto& step : product.plan_for(int8).steps(rows)) names.emplace_back(step.row->name);
  return names;
}

double error_bound(const CudaProduct& product, Use use, bool int8) {
  double bound = 0;
  const int64_t least = int8 ? kernels::least_int8_rows : 1;
  for (const auto& range : product.plan_for(int8).ranges) {
    if (range.most_rows < least) continue;
    bound = std::max(bound, kernels::error_bound(range.steps, int8 && use != Use::gated));
  }
  // silu and the product of two outputs: at most about the errors of both.
  return use == Use::gated ? 2 * bound : bound;
}

std::vector<int64_t> row_counts(const CudaLinear& linear, bool int8) {
  const int64_t least = int8 ? kernels::least_int8_rows : 1;
  std::set<int64_t> counts{least};
  for (const auto& product : linear.products) {
    for (const auto& range : product.plan_for(int8).ranges) {
      if (range.most_rows >= least && range.most_rows < most_rows)
        counts.insert({range.most_rows, range.most_rows + 1});
    }
  }
  if (counts.size() == 1) counts.insert(64 * least);
  return {counts.begin(), counts.end()};
}

}  // namespace w4q::verify
