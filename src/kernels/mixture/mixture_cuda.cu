#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/frame/norm_factor.cuh"
#include "kernels/mixture/mixture_cuda.h"

namespace w4q::kernels {
namespace {

constexpr float never = -INFINITY;

/// The largest of all lanes' values and the first index that has it.
__device__ void first_largest(float& value, int& index) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
    const int at = __shfl_xor_sync(0xFFFFFFFFu, index, step);
    if (other > value || (other == value && at < index)) value = other, index = at;
  }
}

/// Experts outside of the best groups get −∞: lane g has group g.
template <int held>
__device__ void leave_groups(const RouteArgs& args, float (&ranked)[held], const float* all) {
  const int lane = threadIdx.x % 32;
  const int size = args.experts / args.groups;
  float best = never, second = never;
  for (int i = 0; lane < args.groups && i < size; ++i) {
    const float value = all[lane * size + i];
    if (value > best) {
      second = best, best = value;
    } else if (value > second) {
      second = value;
    }
  }
  float sum = lane < args.groups ? (size > 1 ? best + second : best) : never;
  unsigned taken = 0;
  for (int i = 0; i < args.chosen_groups; ++i) {
    float value = taken >> lane & 1 ? never : sum;
    int index = lane;
    first_largest(value, index);
    taken |= 1u << index;
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int expert = lane + 32 * i;
    if (expert < args.experts && (taken >> (expert / size) & 1) == 0) ranked[i] = never;
  }
}

/// A warp for each row; a lane has experts lane, lane + 32, …, `held` of them.
template <int held>
__global__ void route_kernel(const RouteArgs args) {
  __shared__ float all[32 * held];
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int lane = threadIdx.x % 32;
  float* const logits = args.logits + blockIdx.x * args.stride;
  float factor = 1;
  if (args.input_norm != nullptr) factor = norm_factor(args);
  if (args.joined && lane == 0) {
    args.places[args.chosen] = args.experts;
    args.shares[args.chosen] = share_of_joined(args, factor);
  }
  __syncwarp();
  if (args.input_norm != nullptr) {
    for (int64_t i = args.experts + lane; i < args.stride; i += 32) logits[i] *= factor;
  }
  float scores[held], ranked[held];
  float largest = never, sum = 0;
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int expert = lane + 32 * i;
    const float bias =
        args.input_norm != nullptr && args.bias != nullptr && expert < args.experts ? __ldg(args.bias + expert) : 0.0f;
    scores[i] = expert < args.experts ? (__ldcg(logits + expert) - bias) * factor + bias : never;
    largest = fmaxf(largest, scores[i]);
  }
  largest = warp_max(largest);
#pragma unroll
  for (int i = 0; i < held; ++i) {
    if (lane + 32 * i >= args.experts) continue;
    scores[i] = args.sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - largest);
    sum += scores[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int expert = lane + 32 * i;
    ranked[i] = never;
    if (expert >= args.experts) continue;
    if (!args.sigmoid) scores[i] /= sum;
    ranked[i] = scores[i] + (args.correction != nullptr ? __ldg(args.correction + expert) : 0.0f);
    all[expert] = ranked[i];
  }
  if (args.groups > 1) {
    __syncwarp();
    leave_groups(args, ranked, all);
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
    if (lane + 32 * i < args.experts) all[lane + 32 * i] = scores[i];
  }
  __syncwarp();
  int mine = 0;
  float share = 0, total = 0;
  for (int place = 0; place < args.chosen; ++place) {
    float value = never;
    int index = most_routed_experts;
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (ranked[i] > value) value = ranked[i], index = lane + 32 * i;
    }
    first_largest(value, index);
    index = min(index, args.experts - 1);  // of NaN logits
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (lane + 32 * i == index) ranked[i] = never;
    }
    const float score = all[index];
    total += score;
    if (lane == place) mine = index, share = score;
  }
  if (lane >= args.chosen) return;
  share *= args.scale / (args.renormalizes && total > 0 ? total : 1.0f);
  if (args.expert_scale != nullptr) share *= __ldg(args.expert_scale + mine);
  args.places[int64_t{blockIdx.x} * args.chosen + lane] = mine;
  args.shares[int64_t{blockIdx.x} * args.chosen + lane] = share;
}

__global__ void gather_kernel(const __half* x, const int32_t* rows, int64_t cols, __half* out) {
  const __half* const from = x + rows[blockIdx.x] * cols;
  __half* const to = out + blockIdx.x * cols;
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) to[c] = from[c];
}

__global__ void combine_kernel(const CombineArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t col = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= args.cols) return;
  float sum = 0;
  for (int place = 0; place < args.places; ++place) {
    const int64_t at = row * args.places + place;
    const int64_t slot = args.slots == nullptr ? at : __ldcg(args.slots + at);
    sum += __ldcg(args.shares + at) * __ldcg(args.x + slot * args.cols + col);
  }
  if (args.shared != nullptr) {
    const float gate = args.gate != nullptr ? 1.0f / (1.0f + expf(-__ldcg(args.gate + row * args.gate_stride))) : 1.0f;
    sum += gate * __ldcg(args.shared + row * args.cols + col);
  }
  args.y[row * args.cols + col] += sum;
}

constexpr int threads = 256;

}  // namespace

void route_cuda(const RouteArgs& args, const device::Stream& stream) {
  ensure(args.experts >= 1 && args.experts <= most_routed_experts && args.chosen >= 1 &&
             args.chosen <= std::min(args.experts, most_routed_places) && args.groups >= 1 && args.groups <= 32,
         "route: more experts than the kernel takes");
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(args.rows)), .threads = 32, .overlap = args.overlap};
  if (args.experts <= 128) return launch<route_kernel<4>>(shape, stream, "route", args);
  if (args.experts <= 256) return launch<route_kernel<8>>(shape, stream, "route", args);
  launch<route_kernel<most_routed_experts / 32>>(shape, stream, "route", args);
}

void gather_rows_cuda(const __half* x, const int32_t* rows, int64_t count, int64_t cols, __half* out,
                      const device::Stream& stream) {
  if (count == 0) return;
  launch<gather_kernel>({.grid = dim3(static_cast<unsigned>(count)), .threads = threads}, stream, "gather", x, rows,
                        cols, out);
}

void combine_cuda(const CombineArgs& args, const device::Stream& stream) {
  const auto blocks = static_cast<unsigned>((args.cols + threads - 1) / threads);
  launch<combine_kernel>(
      {.grid = dim3(blocks, static_cast<unsigned>(args.rows)), .threads = threads, .overlap = args.overlap}, stream,
      "combine", args);
}

}  // namespace w4q::kernels
