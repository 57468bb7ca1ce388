#include "kernels/sampling/logits_cuda.h"

#include <cuda_fp16.h>

#include "core/error.h"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int threads = 512;
constexpr int best = 5;

/// An entry of a row, ordered by value, the lower id first on ties.
struct Entry {
  float value;
  int id;

  __device__ bool before(const Entry& other) const {
    return value != other.value ? value > other.value : id < other.id;
  }
};
__device__ Entry shuffled(const Entry& entry, int step) {
  return {__shfl_xor_sync(0xFFFFFFFFu, entry.value, step), __shfl_xor_sync(0xFFFFFFFFu, entry.id, step)};
}

/// The first entry of all threads, in every thread.
__device__ Entry first_of_block(Entry entry, Entry* slots) {
  const auto reduce = [](Entry mine) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Entry other = shuffled(mine, step);
      if (other.before(mine)) mine = other;
    }
    return mine;
  };
  entry = reduce(entry);
  __syncthreads();
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = entry;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return reduce(lane < threads / 32 ? slots[lane] : Entry{-INFINITY, INT32_MAX});
}

/// The five first entries of a row, in every thread; id INT32_MAX where the row is shorter.
__device__ void top_five(const float* row, int64_t vocab, Entry* slots, Entry (&top)[best]) {
  Entry mine[best];
#pragma unroll
  for (auto& entry : mine) entry = {-INFINITY, INT32_MAX};
  for (int64_t i = threadIdx.x; i < vocab; i += threads) {
    Entry entry{row[i], static_cast<int>(i)};
    if (!entry.before(mine[best - 1])) continue;
#pragma unroll
    for (auto& place : mine) {
      if (!entry.before(place)) continue;
      const Entry moved = place;
      place = entry;
      entry = moved;
    }
  }
#pragma unroll
  for (auto& winner : top) {
    winner = first_of_block(mine[0], slots);
    if (mine[0].id != winner.id || winner.id == INT32_MAX) continue;
#pragma unroll
    for (int i = 0; i + 1 < best; ++i) mine[i] = mine[i + 1];
    mine[best - 1] = {-INFINITY, INT32_MAX};
  }
}

__device__ double block_sum(double value, double* slots) {
  return block_reduce(value, slots, 0.0, [](double a, double b) { return a + b; });
}

__global__ void __launch_bounds__(threads)
    compare_kernel(const float* base, const float* logits, int64_t vocab, const int32_t* ids, LogitComparison* out) {
  __shared__ float maxima[32];
  __shared__ double sums[32];
  __shared__ Entry entries[32];
  const float* const b = logits + blockIdx.x * vocab;
  const float* const a = base == nullptr ? b : base + blockIdx.x * vocab;
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  float largest_a = -INFINITY;
  float largest_b = -INFINITY;
  for (int64_t i = threadIdx.x; i < vocab; i += threads) {
    largest_a = fmaxf(largest_a, a[i]);
    largest_b = fmaxf(largest_b, b[i]);
  }
  largest_a = block_reduce(largest_a, maxima, -INFINITY, larger);
  largest_b = block_reduce(largest_b, maxima, -INFINITY, larger);
  // KL = Σ p_a · (a − b) − ln Σ e^a + ln Σ e^b.
  float weight_a = 0;
  float weight_b = 0;
  float gap = 0;
  for (int64_t i = threadIdx.x; i < vocab; i += threads) {
    const float p = expf(a[i] - largest_a);
    weight_a += p;
    weight_b += expf(b[i] - largest_b);
    gap += p == 0 ? 0.0f : p * (a[i] - b[i]);
  }
  const double total_a = block_sum(weight_a, sums);
  const double total_b = block_sum(weight_b, sums);
  const double total_gap = block_sum(gap, sums);
  const double log_a = largest_a + log(total_a);
  const double log_b = largest_b + log(total_b);
  const int64_t id = ids[blockIdx.x];
  LogitComparison result;
  result.nll_b = log_b - static_cast<double>(b[id]);
  if (base != nullptr) {
    result.nll_a = log_a - static_cast<double>(a[id]);
    result.kl = total_gap / total_a - log_a + log_b;
    Entry top_a[best];
    Entry top_b[best];
    top_five(a, vocab, entries, top_a);
    top_five(b, vocab, entries, top_b);
    result.same_top1 = top_a[0].id == top_b[0].id;
    for (const auto& x : top_a) {
      for (const auto& y : top_b) result.top5_overlap += x.id == y.id && x.id != INT32_MAX ? 1 : 0;
    }
  }
  if (threadIdx.x == 0) out[blockIdx.x] = result;
}

}  // namespace

void compare_logits_cuda(const float* base, const float* logits, int64_t rows, int64_t vocab, const int32_t* ids,
                         LogitComparison* out, const device::Stream& stream) {
  ensure(rows >= 1 && vocab >= 1 && logits != nullptr, "compare_logits: no logits");
  const LaunchShape shape{dim3(static_cast<unsigned>(rows)), threads, 0, false};
  launch<compare_kernel>(shape, stream, "compare_logits", base, logits, vocab, ids, out);
}

}  // namespace w4q::kernels
