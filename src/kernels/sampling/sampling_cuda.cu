#include <cuda_fp16.h>

#include <algorithm>

#include "core/error.h"
#include "core/rng.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/sampling/sampling_cuda.h"

namespace w4q::kernels {
namespace {

constexpr int threads = 1024;
constexpr int buckets = 256;
constexpr float mass_unit = 0x1p40f;

/// A float's bits in an order that follows its value; NaN counts as −∞.
__device__ uint32_t ordered(float value) {
  if (value != value) value = -INFINITY;
  if (value == 0) value = 0;  // −0 is 0
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float unordered(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}

struct Row {
  const float* data;
  int64_t vocab;

  __device__ uint32_t key(int64_t i) const { return ordered(data[i]); }

  /// use(i, key) for the thread's share of the entries: eight neighbours at a time, two loads in flight.
  template <class Use>
  __device__ void for_each(const Use& use) const {
    share(threadIdx.x, threads, use);
  }
  /// The same among all threads of the grid.
  template <class Use>
  __device__ void for_each_of_grid(const Use& use) const {
    share(int64_t{blockIdx.x} * threads + threadIdx.x, int64_t{gridDim.x} * threads, use);
  }

 private:
  template <class Use>
  __device__ void share(int64_t first, int64_t step, const Use& use) const {
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    const int64_t chunks = aligned ? vocab / 8 : 0;
#pragma unroll 2
    for (int64_t chunk = first; chunk < chunks; chunk += step) {
      float values[8];
      load_eight(chunk, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) use(8 * chunk + j, ordered(values[j]));
    }
    for (int64_t i = 8 * chunks + first; i < vocab; i += step) use(i, key(i));
  }
  __device__ void load_eight(int64_t chunk, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = reinterpret_cast<const float4*>(data)[2 * chunk + i];
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  }
};

/// The tokens that are still candidates: all with a key above `key`, and the first `ties` of those with that key, by
/// id.
struct Cut {
  uint32_t key = 0;
  int64_t ties = INT64_MAX;
};

struct Shared {
  unsigned long long histogram[buckets];
  unsigned long long reduce[32];
  uint64_t above;
  int bucket;
  int token;
  bool last;
};

/// What a token with this key counts: one, or its probability in units of 2^-40 of the likeliest one's.
struct Measure {
  bool mass;
  uint32_t top;
  float inverse_temperature;

  __device__ uint64_t of(uint32_t key) const {
    if (!mass) return 1;
    const float share = __expf((unordered(key) - unordered(top)) * inverse_temperature);
    return static_cast<uint64_t>(share * mass_unit);
  }
};

template <class T, class Combine>
__device__ T reduce(T value, Shared& shared, T neutral, const Combine& combine) {
  return block_reduce(value, reinterpret_cast<T*>(shared.reduce), neutral, combine);
}

/// The likeliest token, the lowest id on ties.
struct Top {
  uint32_t key;
  int id;
};
/// Of all blocks' shares; true in the block that came last, which has it and goes on alone.
__device__ bool find_likeliest(const Row& row, StepState& state, Shared& shared, Top& top) {
  unsigned long long best = 0;
  row.for_each_of_grid([&](int64_t i, uint32_t key) {
    best = max(best, static_cast<unsigned long long>(key) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(i)));
  });
  best = reduce(best, shared, 0ull, [](unsigned long long a, unsigned long long b) { return max(a, b); });
  if (threadIdx.x == 0) {
    atomicMax(&state.best, best);
    __threadfence();
    shared.last = atomicAdd(&state.done, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!shared.last) return false;
  __threadfence();
  best = __ldcg(&state.best);
  __syncthreads();
  if (threadIdx.x == 0) state.best = 0, state.done = 0;
  top = {static_cast<uint32_t>(best >> 32), static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(best))};
  return true;
}

/// The id of the token with this key that has `before` such tokens before it.
__device__ int nth_with_key(const Row& row, uint32_t key, int64_t before, Shared& shared) {
  const int64_t each = (row.vocab + threads - 1) / threads;
  const int64_t begin = min(static_cast<int64_t>(threadIdx.x) * each, row.vocab);
  const int64_t end = min(begin + each, row.vocab);
  int count = 0;
  for (int64_t i = begin; i < end; ++i) count += row.key(i) == key ? 1 : 0;
  // Inclusive sums over the block: within warps, then of the warps before.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int sum = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.reduce[threadIdx.x / 32] = static_cast<unsigned long long>(sum);
  __syncthreads();
  int64_t base = sum - count;
  for (unsigned warp = 0; warp < threadIdx.x / 32; ++warp) base += static_cast<int64_t>(shared.reduce[warp]);
  if (before >= base && before < base + count) {
    int64_t left = before - base;
    for (int64_t i = begin; i < end; ++i) {
      if (row.key(i) == key && left-- == 0) shared.token = static_cast<int>(i);
    }
  }
  __syncthreads();
  return shared.token;
}

/// Walks down from the likeliest token, through those that `cut` keeps, to the one with which the sum of the measure
/// exceeds `target` (reaches it, when `reach`): its key, and how many tokens of that key are then passed, itself
/// included. Eight bits of the key at a time.
__device__ Cut descend(const Row& row, const Cut& cut, const Measure& measure, uint64_t target, bool reach,
                       Shared& shared) {
  uint32_t prefix = 0;
  uint64_t above = 0;  // sum over all keys above the prefix's range
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = static_cast<int>(threadIdx.x); i < buckets; i += threads) shared.histogram[i] = 0;
    __syncthreads();
    row.for_each([&](int64_t, uint32_t key) {
      const bool inside = shift == 24 || (key >> (shift + 8)) == (prefix >> (shift + 8));
      if (inside && key > cut.key) atomicAdd(&shared.histogram[key >> shift & 255u], measure.of(key));
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      // Tokens at the cut itself count by their number, which the last bucket search resolves.
      const bool cut_inside = shift == 24 || (cut.key >> (shift + 8)) == (prefix >> (shift + 8));
      if (cut_inside && cut.ties != INT64_MAX && cut.ties > 0) {
        shared.histogram[cut.key >> shift & 255u] += measure.of(cut.key) * static_cast<uint64_t>(cut.ties);
      }
      int bucket = buckets - 1;
      for (; bucket > 0; --bucket) {
        const uint64_t with = above + shared.histogram[bucket];
        if (shared.histogram[bucket] > 0 && (reach ? with >= target : with > target)) break;
        above = with;
      }
      shared.bucket = bucket;
      shared.above = above;
    }
    __syncthreads();
    above = shared.above;
    prefix |= static_cast<uint32_t>(shared.bucket) << shift;
    __syncthreads();
  }
  const uint64_t each = max(measure.of(prefix), uint64_t{1});
  const uint64_t missing = target > above ? target - above : 0;
  const uint64_t passed = reach ? (missing + each - 1) / each : missing / each + 1;
  return {prefix, static_cast<int64_t>(max(passed, uint64_t{1}))};
}

/// How many tokens have the key of the cut, kept or not.
__device__ int64_t count_key(const Row& row, uint32_t key, Shared& shared) {
  unsigned long long count = 0;
  row.for_each([&](int64_t, uint32_t other) { count += other == key ? 1 : 0; });
  return static_cast<int64_t>(
      reduce(count, shared, 0ull, [](unsigned long long a, unsigned long long b) { return a + b; }));
}

__device__ uint64_t total(const Row& row, const Cut& cut, const Measure& measure, Shared& shared) {
  unsigned long long sum = 0;
  row.for_each([&](int64_t, uint32_t key) {
    if (key > cut.key) sum += measure.of(key);
  });
  sum = reduce(sum, shared, 0ull, [](unsigned long long a, unsigned long long b) { return a + b; });
  return cut.ties == INT64_MAX ? sum : sum + measure.of(cut.key) * static_cast<uint64_t>(cut.ties);
}

__device__ Cut narrower(const Row& row, const Cut& old, const Cut& cut, Shared& shared) {
  if (cut.key < old.key || (cut.key == old.key && cut.ties >= old.ties)) return old;
  return {cut.key, min(cut.ties, count_key(row, cut.key, shared))};
}

/// −1 where the largest logit is not finite.
__device__ int draw(const Row& row, const Top& first, const SamplingOptions& options, uint64_t number, Shared& shared) {
  if (!isfinite(unordered(first.key))) return -1;
  if (options.temperature == 0 || options.top_k == 1) return first.id;
  const uint32_t top = first.key;
  const Measure ones{false, top, 0};
  const Measure mass{true, top, static_cast<float>(1 / options.temperature)};
  Cut cut;
  if (options.top_k > 0 && options.top_k < row.vocab) {
    cut = narrower(row, cut, descend(row, cut, ones, static_cast<uint64_t>(options.top_k), true, shared), shared);
  }
  if (options.top_p < 1) {
    const double limit = options.top_p * static_cast<double>(total(row, cut, mass, shared));
    const auto target = static_cast<uint64_t>(ceil(limit));
    cut = narrower(row, cut, descend(row, cut, mass, target, true, shared), shared);
  }
  if (options.min_p > 0) {
    // The lowest logit whose probability is at least min_p of the likeliest one's; one below it is cut off.
    const float least = unordered(top) + logf(static_cast<float>(options.min_p)) / mass.inverse_temperature;
    const uint32_t key = ordered(least);
    if (key > cut.key) cut = {key, count_key(row, key, shared)};
  }
  const uint64_t all = total(row, cut, mass, shared);
  const auto target = static_cast<uint64_t>(random_uniform(options.seed, number) * static_cast<double>(all));
  const Cut chosen = descend(row, cut, mass, min(target, all - 1), false, shared);
  return nth_with_key(row, chosen.key, chosen.ties - 1, shared);
}

__global__ void __launch_bounds__(threads) sample_kernel(const SampleArgs args) {
  __shared__ Shared shared;
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const Row row{args.logits, args.vocab};
  Top first;
  if (!find_likeliest(row, *args.state, shared, first)) return;
  const uint64_t number = args.state->draw;
  const int token = draw(row, first, args.options, number, shared);
  if (threadIdx.x != 0) return;
  args.state->token = max(token, 0);  // the next step reads an embedding
  args.state->position += 1;
  args.state->draw = number + 1;
  args.history[number % static_cast<uint64_t>(args.history_capacity)] = token;
}

}  // namespace

void sample_cuda(const SampleArgs& args, const device::Stream& stream) {
  ensure(args.vocab >= 1 && args.logits != nullptr && args.history_capacity >= 1, "sample: no logits");
  constexpr int64_t most_blocks = 64, share = 8 * threads;
  const auto blocks = static_cast<unsigned>(std::clamp((args.vocab + share - 1) / share, int64_t{1}, most_blocks));
  launch<sample_kernel>({dim3(blocks), threads, 0, args.overlap}, stream, "sample", args);
}

}  // namespace w4q::kernels
