#include <algorithm>
#include <cmath>
#include <cstdint>

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

/// Products of heads' queries and keys [heads][length, length] become the weights of their values, a block a query.
__global__ void __launch_bounds__(element_threads) weigh_kernel(Seen seen, float scale, float* scores) {
  __shared__ float slots[32];
  const int64_t row = blockIdx.x, first = seen.oldest(row);
  float* const x = scores + (int64_t{blockIdx.y} * seen.length + row) * seen.length;
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
  const int64_t row = blockIdx.x, first = (int64_t{blockIdx.y} * seen.length + row) * seen.length;
  float sum = 0;
  for (int64_t c = threadIdx.x; c <= row; c += element_threads) sum += weights[first + c] * by[first + c];
  sum = block_reduce(sum, slots, 0.0f, [](float a, float b) { return a + b; });
  for (int64_t c = threadIdx.x; c < seen.length; c += element_threads) {
    by[first + c] = weights[first + c] * (by[first + c] - sum) * scale;  // zero where nothing is seen
  }
}

/// Products of heads that have keys of their own go side by side as long as they stay in the L2 cache.
constexpr int64_t bytes_at_once = int64_t{32} << 20;

int64_t bytes_of_head(const AttendedRows& rows) { return 2 * rows.length * rows.length * int64_t{sizeof(float)}; }

int64_t heads_at_once(const AttendedRows& rows) {
  return std::clamp<int64_t>(bytes_at_once / bytes_of_head(rows), 1, rows.kv_heads);
}

/// The products of some heads, one of each key.
class HeadProducts {
 public:
  HeadProducts(const AttendedRows& rows, void* scratch, void* workspace, const device::Stream& stream)
      : rows_(rows),
        scale_(rows.scale > 0 ? static_cast<float>(rows.scale) : 1.0f / std::sqrt(static_cast<float>(rows.head_dim))),
        weights_(static_cast<float*>(scratch)),
        by_(weights_ + heads_at_once(rows) * rows.length * rows.length),
        workspace_(workspace),
        stream_(stream) {}

  /// Calls work(more) for all heads, some at a time; `more`: others that share their keys were there before.
  template <class Work>
  void each(const Work& work) {
    const int64_t sharing = rows_.heads / rows_.kv_heads;
    for (key_ = 0; key_ < rows_.kv_heads; key_ += count_) {
      count_ = std::min(heads_at_once(rows_), rows_.kv_heads - key_);
      for (int64_t member = 0; member < sharing; ++member) {
        query_ = key_ * sharing + member;
        work(member > 0);
      }
    }
  }

  /// Rows of heads that queries have, or keys: where the first begins, how far rows and heads are apart.
  template <class T>
  struct Rows {
    T* first;
    int64_t ld, apart;
  };
  template <class T>
  Rows<T> queries(T* all) const {
    return {all + query_ * rows_.head_dim, rows_.heads * rows_.head_dim, rows_.heads / rows_.kv_heads * rows_.head_dim};
  }
  template <class T>
  Rows<T> keys(T* all) const {
    return {all + key_ * rows_.head_dim, rows_.kv_heads * rows_.head_dim, rows_.head_dim};
  }

  void weigh() {
    between(queries(rows_.queries), keys(rows_.keys), weights_);
    weigh_kernel<<<grid(), element_threads, 0, stream_.get()>>>({rows_.length, rows_.window}, scale_, weights_);
  }
  void weigh_back(const float* gradient) {
    between(queries(gradient), keys(rows_.values), by_);
    weigh_back_kernel<<<grid(), element_threads, 0, stream_.get()>>>({rows_.length, rows_.window}, scale_, weights_,
                                                                     by_);
  }

  const float* weights() const { return weights_; }
  const float* by() const { return by_; }

  /// to [length, head_dim] = scores · x, or its transpose's product; `add`: to +=.
  void apply(const float* scores, bool transposed, Rows<const float> x, Rows<float> to, bool add) {
    device::CublasFloatProduct product{.m = rows_.length, .n = rows_.head_dim, .k = rows_.length};
    product.a = scores;
    product.lda = rows_.length;
    product.a_apart = rows_.length * rows_.length;
    product.a_transposed = transposed;
    product.b = x.first;
    product.ldb = x.ld;
    product.b_apart = x.apart;
    product.c = to.first;
    product.ldc = to.ld;
    product.c_apart = to.apart;
    run(product, add);
  }

 private:
  dim3 grid() const { return {static_cast<unsigned>(rows_.length), static_cast<unsigned>(count_)}; }

  /// to [length, length] = a · bᵀ.
  void between(Rows<const float> a, Rows<const float> b, float* to) {
    device::CublasFloatProduct product{.m = rows_.length, .n = rows_.length, .k = rows_.head_dim};
    product.a = a.first;
    product.lda = a.ld;
    product.a_apart = a.apart;
    product.b = b.first;
    product.ldb = b.ld;
    product.b_apart = b.apart;
    product.b_transposed = true;
    product.c = to;
    product.ldc = rows_.length;
    product.c_apart = rows_.length * rows_.length;
    run(product, false);
  }
  void run(device::CublasFloatProduct product, bool add) {
    product.workspace = workspace_;
    product.add = add;
    product.tensor_cores = true;
    product.count = count_;
    device::cublas_multiply(product, stream_);
  }

  const AttendedRows rows_;
  float scale_;
  float *weights_, *by_;
  void* workspace_;
  const device::Stream& stream_;
  int64_t key_ = 0, query_ = 0, count_ = 0;  ///< the first head of keys, and of queries, and how many
};

}  // namespace

int64_t attended_rows_scratch(const AttendedRows& rows) { return heads_at_once(rows) * bytes_of_head(rows); }

void attend_rows_cuda(const AttendedRows& rows, float* out, void* scratch, void* workspace,
                      const device::Stream& stream) {
  HeadProducts heads(rows, scratch, workspace, stream);
  heads.each([&](bool) {
    heads.weigh();
    heads.apply(heads.weights(), false, heads.keys(rows.values), heads.queries(out), false);
  });
  device::check_launch("attention", concat(rows.length, ", ", rows.heads, " heads"));
}

void attend_rows_gradient_cuda(const AttendedRows& rows, const float* gradient, float* by_queries, float* by_keys,
                               float* by_values, void* scratch, void* workspace, const device::Stream& stream) {
  HeadProducts heads(rows, scratch, workspace, stream);
  heads.each([&](bool more) {
    heads.weigh();
    heads.apply(heads.weights(), true, heads.queries(gradient), heads.keys(by_values), more);
    heads.weigh_back(gradient);
    heads.apply(heads.by(), false, heads.keys(rows.keys), heads.queries(by_queries), false);
    heads.apply(heads.by(), true, heads.queries(rows.queries), heads.keys(by_keys), more);
  });
  device::check_launch("gradients of attention", concat(rows.length, ", ", rows.heads, " heads"));
}

}  // namespace w4q::kernels
