#include <cmath>

#include "core/text.h"
#include "device/check.h"
#include "device/cublas.h"
#include "device/element_grid.h"
#include "kernels/common/block_reduce.cuh"
#include "kernels/gradient/gradient_cuda.h"

namespace w4q::kernels {
namespace {

using device::element_threads;

struct Seen {
  int64_t length, window;

  __device__ int64_t oldest(int64_t row) const { return window > 0 ? max(int64_t{0}, row - window + 1) : 0; }
};

/// Products of one head's queries and keys [length, length] become the weights of its values, a block a query.
__global__ void __launch_bounds__(element_threads) weigh_kernel(Seen seen, float scale, float* scores) {
  __shared__ float slots[32];
  const int64_t row = blockIdx.x, first = seen.oldest(row);
  float* const x = scores + row * seen.length;
  float largest = -INFINITY, sum = 0;
  for (int64_t c = first + threadIdx.x; c <= row; c += element_threads) largest = fmaxf(largest, x[c] * scale);
  largest = block_reduce(largest, slots, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
  for (int64_t c = first + threadIdx.x; c <= row; c += element_threads) sum += expf(x[c] * scale - largest);
  sum = block_reduce(sum, slots, 0.0f, [](float a, float b) { return a + b; });
  for (int64_t c = threadIdx.x; c < seen.length; c += element_threads) {
    x[c] = c >= first && c <= row ? expf(x[c] * scale - largest) / sum : 0.0f;
  }
}

/// `by` weights becomes by the products before them: weight · (by − Σ weight · by) · scale.
__global__ void __launch_bounds__(element_threads)
    weigh_back_kernel(Seen seen, float scale, const float* weights, float* by) {
  __shared__ float slots[32];
  const int64_t row = blockIdx.x, first = row * seen.length;
  float sum = 0;
  for (int64_t c = threadIdx.x; c <= row; c += element_threads) sum += weights[first + c] * by[first + c];
  sum = block_reduce(sum, slots, 0.0f, [](float a, float b) { return a + b; });
  for (int64_t c = threadIdx.x; c < seen.length; c += element_threads) {
    by[first + c] = weights[first + c] * (by[first + c] - sum) * scale;  // zero where nothing is seen
  }
}

/// The products of one head.
class HeadProducts {
 public:
  HeadProducts(const AttendedRows& rows, void* scratch, void* workspace, const device::Stream& stream)
      : rows_(rows),
        scale_(rows.scale > 0 ? static_cast<float>(rows.scale) : 1.0f / std::sqrt(static_cast<float>(rows.head_dim))),
        weights_(static_cast<float*>(scratch)),
        by_(weights_ + rows.length * rows.length),
        workspace_(workspace),
        stream_(stream) {}

  int64_t at_query(int64_t head) const { return head * rows_.head_dim; }
  int64_t at_key(int64_t head) const { return head / (rows_.heads / rows_.kv_heads) * rows_.head_dim; }

  void weigh(int64_t head) {
    between(rows_.queries + at_query(head), query_stride(), rows_.keys + at_key(head), weights_);
    weigh_kernel<<<static_cast<unsigned>(rows_.length), element_threads, 0, stream_.get()>>>(
        {rows_.length, rows_.window}, scale_, weights_);
  }
  void weigh_back(const float* gradient, int64_t head) {
    between(gradient + at_query(head), query_stride(), rows_.values + at_key(head), by_);
    weigh_back_kernel<<<static_cast<unsigned>(rows_.length), element_threads, 0, stream_.get()>>>(
        {rows_.length, rows_.window}, scale_, weights_, by_);
  }

  const float* weights() const { return weights_; }
  const float* by() const { return by_; }
  int64_t query_stride() const { return rows_.heads * rows_.head_dim; }
  int64_t key_stride() const { return rows_.kv_heads * rows_.head_dim; }

  /// to [length, head_dim] = scores · x, or its transpose's product; `add`: to +=.
  void apply(const float* scores, bool transposed, const float* x, int64_t ldx, float* to, int64_t ldt, bool add) {
    device::CublasFloatProduct product{.m = rows_.length, .n = rows_.head_dim, .k = rows_.length};
    product.a = scores;
    product.lda = rows_.length;
    product.a_transposed = transposed;
    product.b = x;
    product.ldb = ldx;
    product.c = to;
    product.ldc = ldt;
    run(product, add);
  }

 private:
  /// to [length, length] = a · bᵀ, b of a key head.
  void between(const float* a, int64_t lda, const float* b, float* to) {
    device::CublasFloatProduct product{.m = rows_.length, .n = rows_.length, .k = rows_.head_dim};
    product.a = a;
    product.lda = lda;
    product.b = b;
    product.ldb = key_stride();
    product.b_transposed = true;
    product.c = to;
    product.ldc = rows_.length;
    run(product, false);
  }
  void run(device::CublasFloatProduct product, bool add) {
    product.workspace = workspace_;
    product.add = add;
    product.tensor_cores = true;
    device::cublas_multiply(product, stream_);
  }

  const AttendedRows rows_;
  float scale_;
  float *weights_, *by_;
  void* workspace_;
  const device::Stream& stream_;
};

}  // namespace

int64_t attended_rows_scratch(const AttendedRows& rows) {
  return 2 * rows.length * rows.length * int64_t{sizeof(float)};
}

void attend_rows_cuda(const AttendedRows& rows, float* out, void* scratch, void* workspace,
                      const device::Stream& stream) {
  HeadProducts head(rows, scratch, workspace, stream);
  for (int64_t h = 0; h < rows.heads; ++h) {
    head.weigh(h);
    head.apply(head.weights(), false, rows.values + head.at_key(h), head.key_stride(), out + head.at_query(h),
               head.query_stride(), false);
  }
  device::check_launch("attention", concat(rows.length, ", ", rows.heads, " heads"));
}

void attend_rows_gradient_cuda(const AttendedRows& rows, const float* gradient, float* by_queries, float* by_keys,
                               float* by_values, void* scratch, void* workspace, const device::Stream& stream) {
  HeadProducts head(rows, scratch, workspace, stream);
  for (int64_t h = 0; h < rows.heads; ++h) {
    const bool more = h % (rows.heads / rows.kv_heads) != 0;  // of the heads that share a key
    const int64_t query = head.at_query(h), key = head.at_key(h);
    head.weigh(h);
    head.apply(head.weights(), true, gradient + query, head.query_stride(), by_values + key, head.key_stride(), more);
    head.weigh_back(gradient, h);
    head.apply(head.by(), false, rows.keys + key, head.key_stride(), by_queries + query, head.query_stride(), false);
    head.apply(head.by(), true, rows.queries + query, head.query_stride(), by_keys + key, head.key_stride(), more);
  }
  device::check_launch("gradients of attention", concat(rows.length, ", ", rows.heads, " heads"));
}

}  // namespace w4q::kernels
