#include "verify/product_kernels_cuda.h"

#include <algorithm>
#include <set>

#include "kernels/linear/dense_gemv_cuda.h"
#include "kernels/linear/int8_rows.h"

namespace w4q::verify {

using decoder_cuda::CudaLinear;
using decoder_cuda::CudaProduct;

namespace {

constexpr int64_t most_rows = 2048;

/// Puts the two counts between which the kernels change into `counts`, wherever they do from `low` to `high`.
template <class Names>
void add_changes(const Names& names, int64_t low, int64_t high, std::set<int64_t>& counts) {
  if (names(low) == names(high)) return;
  if (high - low > 1) {
    add_changes(names, low, (low + high) / 2, counts);
    add_changes(names, (low + high) / 2, high, counts);
  } else {
    counts.insert({low, high});
  }
}

}  // namespace

std::vector<std::string> kernel_names(const device::Properties& gpu, const CudaProduct& product, int64_t k,
                                      int64_t rows, bool int8) {
  if (!product.rotated.empty()) {
    kernels::RotatedLinearArgs args;
    args.m = rows;
    args.passes = product.rotated;
    args.input_scale = product.input_scale;
    const auto names = kernels::rotated_kernels(gpu, args);
    return {names.begin(), names.end()};
  }
  if (!product.packed) return {rows == 1 && kernels::dense_gemv_accepts(product.n, k) ? "f16-gemv" : "cuBLAS"};
  const auto& packed = *product.packed;
  return {std::string(
      kernels::pick_kernel({gpu, packed.scheme, packed.layout, rows, packed.n, packed.k, DType::f16, int8}).name)};
}

double error_bound(const device::Properties& gpu, const CudaProduct& product, int64_t k, Use use, bool int8) {
  // silu and the product of two outputs: at most about the errors of both.
  const double gated = use == Use::gated ? 2 : 1;
  if (!product.rotated.empty()) return gated * kernels::rotated_error_bound(product.rotated.size());
  if (!product.packed) return gated * kernels::dense_error_bound;
  const auto& packed = *product.packed;
  const kernels::LinearDesc desc{gpu, packed.scheme, packed.layout, kernels::least_int8_rows, packed.n,
                                 k,   DType::f16,    int8};
  return gated * kernels::pick_kernel(desc).error_bound(DType::f16, use != Use::gated);
}

std::vector<int64_t> row_counts(const device::Properties& gpu, const CudaLinear& linear, bool int8) {
  const int64_t least = int8 ? kernels::least_int8_rows : 1;
  std::set<int64_t> counts{least};
  for (const auto& product : linear.products) {
    // Looked for between powers of two: no kernel has a range within.
    const auto names = [&](int64_t rows) { return kernel_names(gpu, product, linear.k, rows, int8); };
    for (int64_t low = least; low < most_rows; low = std::min(2 * low, most_rows)) {
      add_changes(names, low, std::min(2 * low, most_rows), counts);
    }
  }
  if (counts.size() == 1) counts.insert(64 * least);
  return {counts.begin(), counts.end()};
}

}  // namespace w4q::verify
