// A GEMV that takes some of many weights: the experts that a token is sent to. It can choose them itself, from the logits that
// the launch before left: every block does, which costs it less than a launch that all would wait for.
//
// N-tiles are counted place by place where each place has outputs of its own, and output by output, all of its places one
// after the other, where the products of all places add up.
#pragma once

#include "kernels/common/block_reduce.cuh"
#include "kernels/frame/launch.cuh"
#include "kernels/frame/norm_factor.cuh"

namespace w4q::kernels::frame {

struct RoutedLaunch : Launch {
  RouteArgs choice;           ///< logits null: the experts of `routes` have been chosen
  ExpertPrefetch next_codes;  ///< null: nothing to fetch
};

/// Which weights each place takes, and how much of them.
struct Places {
  int experts[most_routed_places];
  float shares[most_routed_places];
};

/// Those of this block.
__device__ __forceinline__ Places& places_here() {
  __shared__ Places places;
  return places;
}

/// The logit of this thread's expert, and −∞ where there is none.
__device__ __forceinline__ float complete_logit(const RouteArgs& args, float factor) {
  const int expert = static_cast<int>(threadIdx.x);
  if (expert >= args.experts) return -INFINITY;
  const float bias = args.input_norm != nullptr && args.bias != nullptr ? __ldg(args.bias + expert) : 0.0f;
  return (__ldcg(args.logits + expert) - bias) * factor + bias;
}

/// Probabilities are the exponential of logits − largest, over the sum of all. By a whole warp.
struct Softmax {
  float largest = -INFINITY, sum = 0;

  __device__ __forceinline__ Softmax(const float* logits, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = lane; i < count; i += 32) largest = fmaxf(largest, logits[i]);
    largest = warp_max(largest);
    for (int i = lane; i < count; i += 32) sum += expf(logits[i] - largest);
    sum = warp_sum(sum);
  }
  __device__ __forceinline__ float operator()(float logit) const { return expf(logit - largest) / sum; }
};

/// How many of `count` values, a multiple of four, come before this thread's: the larger, and of equals the first.
__device__ __forceinline__ int rank_of(const float4* values, int count, float mine) {
  const int own = static_cast<int>(threadIdx.x);
  int rank = 0;
  for (int i = 0; i < count; i += 4) {
    const float4 four = values[i / 4];
    rank += four.x > mine || (four.x == mine && i < own) ? 1 : 0;
    rank += four.y > mine || (four.y == mine && i + 1 < own) ? 1 : 0;
    rank += four.z > mine || (four.z == mine && i + 2 < own) ? 1 : 0;
    rank += four.w > mine || (four.w == mine && i + 3 < own) ? 1 : 0;
  }
  return rank;
}

/// Chooses as route_kernel does, a thread for each expert; block 0 leaves its choice for the launches behind.
template <int threads>
__device__ __forceinline__ void choose_experts(const RouteArgs& args, Places& places) {
  static_assert(threads >= most_experts_chosen_by_product);
  __shared__ float logits[threads];
  __shared__ __align__(16) float ranked[threads];
  const int thread = static_cast<int>(threadIdx.x);
  const float factor = args.input_norm != nullptr ? norm_factor(args) : 1.0f;
  const float logit = complete_logit(args, factor);
  logits[thread] = logit;
  if (thread < most_routed_places) {
    places.experts[thread] = args.joined && thread == args.chosen ? args.experts : 0;  // 0: of NaN logits
    places.shares[thread] = 0;
  }
  __syncthreads();
  const float score = args.sigmoid ? 1.0f / (1.0f + expf(-logit)) : Softmax(logits, args.experts)(logit);
  const bool exists = thread < args.experts;
  const float mine = exists ? score + (args.correction != nullptr ? __ldg(args.correction + thread) : 0.0f) : -INFINITY;
  ranked[thread] = mine;
  __syncthreads();
  if (exists) {
    const int rank = rank_of(reinterpret_cast<const float4*>(ranked), (args.experts + 3) / 4 * 4, mine);
    if (rank < args.chosen) places.experts[rank] = thread, places.shares[rank] = score;
  }
  __syncthreads();
  if (thread >= 32) return;
  const float part = thread < args.chosen ? places.shares[thread] : 0.0f;
  const float total = warp_sum(part);
  float share = part * args.scale / (args.renormalizes && total > 0 ? total : 1.0f);
  if (thread < args.chosen && args.expert_scale != nullptr) share *= __ldg(args.expert_scale + places.experts[thread]);
  if (blockIdx.x != 0) return;
  const bool joins = args.joined && thread == args.chosen;
  if (joins) share = share_of_joined(args, factor);
  __syncwarp();
  if (args.input_norm != nullptr) {
    for (int64_t i = args.experts + thread; i < args.stride; i += 32) args.logits[i] *= factor;
  }
  if (joins || thread < args.chosen) args.places[thread] = places.experts[thread], args.shares[thread] = share;
}

/// Fills places_here(), once the launch before is done. By the whole block.
template <int threads>
__device__ __forceinline__ void find_places(const RoutedLaunch& args) {
  Places& places = places_here();
  if (args.choice.logits != nullptr) return choose_experts<threads>(args.choice, places);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < args.routes.places) {
    places.experts[thread] = __ldcg(args.routes.experts + thread);
    places.shares[thread] = args.routes.shares != nullptr ? __ldcg(args.routes.shares + thread) : 1.0f;
  }
  __syncthreads();
}

/// Where the weights of a launch stand that takes some of many: a lane knows the one of its own place.
struct Router {
  const Routes& routes;
  const int expert;
  const float share;

  /// Once the places are found.
  __device__ explicit Router(const Launch& args)
      : routes(args.routes),
        expert(places_here().experts[threadIdx.x % most_routed_places]),
        share(places_here().shares[threadIdx.x % most_routed_places]) {}

  __device__ int place_of(int group) const { return routes.sums > 1 ? group % routes.sums : group / routes.groups; }
  /// What is added to the number of a tile of N-tile `group`. By a whole warp.
  __device__ int tiles_before(const Launch& args, int group) const {
    const int place = place_of(group);
    const int output = routes.sums > 1 ? group / routes.sums : group - place * routes.groups;
    return (__shfl_sync(0xFFFFFFFFu, expert, place) * routes.groups + output - group) * args.k_tiles;
  }
  /// What is added to the activations' pointer.
  __device__ int64_t inputs_before(int group) const { return place_of(group) * routes.x_stride; }
  /// What products of N-tile `group` count in a sum. By a whole warp.
  __device__ float share_of(int group) const {
    const float mine = __shfl_sync(0xFFFFFFFFu, share, place_of(group));
    return routes.sums > 1 ? mine : 1.0f;
  }
};

/// The bias of an output: that of the expert of its place, or the sum of those of all.
__device__ __forceinline__ float bias_of(const RoutedLaunch& args, int row) {
  const Places& places = places_here();
  const int n = 64 * args.routes.groups;
  if (args.routes.sums == 1) return __ldg(args.bias + int64_t{places.experts[row / n]} * n + row % n);
  float sum = 0;
  for (int place = 0; place < args.routes.places; ++place) {
    sum += places.shares[place] * __ldg(args.bias + int64_t{places.experts[place]} * n + row);
  }
  return sum;
}

/// Brings the codes that the launch behind this one reads of the same experts to the L2 cache, each warp a share.
template <int warps>
__device__ __forceinline__ void prefetch_experts(const RoutedLaunch& args, int warp) {
  if (args.next_codes.codes == nullptr) return;
  constexpr int line = 128;
  const int each = static_cast<int>(args.next_codes.bytes / line), lines = each * args.routes.places;
  const int all = static_cast<int>(gridDim.x) * warps, mine = static_cast<int>(blockIdx.x) * warps + warp;
  for (int at = mine * 32 + static_cast<int>(threadIdx.x) % 32; at < lines; at += all * 32) {
    const int64_t expert = places_here().experts[at / each];
    const char* const from = args.next_codes.codes + (expert * each + at % each) * line;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

}  // namespace w4q::kernels::frame
