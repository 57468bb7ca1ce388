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
#pragma unroll 1
    for (int i = lane; i < count; i += 32) largest = fmaxf(largest, logits[i]);
    largest = warp_max(largest);
#pragma unroll 1
    for (int i = lane; i < count; i += 32) sum += expf(logits[i] - largest);
    sum = warp_sum(sum);
  }
  __device__ __forceinline__ float operator()(float logit) const { return expf(logit - largest) / sum; }
};

/// How many of `count` values, a multiple of four, come before this thread's: the larger, and of equals the first.
__device__ __forceinline__ int rank_of(const float4* values, int count, float mine) {
  const int own = static_cast<int>(threadIdx.x);
  int rank = 0;
#pragma unroll 2
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
#pragma unroll 1
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
  /// Of an N-tile as they are counted.
  struct At {
    int place = 0, output = 0;
  };

  const Routes& routes;  ///< without places: the launch has one weight
  int expert = 0;
  float share = 1;

  __device__ explicit Router(const Launch& args) : routes(args.routes) {}
  /// Once the places are found.
  __device__ void look_up() {
    expert = places_here().experts[threadIdx.x % most_routed_places];
    share = places_here().shares[threadIdx.x % most_routed_places];
  }

  __device__ At at(int group) const {
    if (routes.places == 0) return {0, group};
    const int inner = routes.sums > 1 ? routes.sums : routes.groups, outer = group / inner,
              rest = group - outer * inner;
    return routes.sums > 1 ? At{rest, outer} : At{outer, rest};
  }
  /// The one behind it.
  __device__ At next(At at) const {
    if (routes.sums > 1) {
      const bool turns = at.place + 1 == routes.sums;
      return {turns ? 0 : at.place + 1, at.output + (turns ? 1 : 0)};
    }
    const bool turns = at.output + 1 == routes.groups;
    return {at.place + (turns ? 1 : 0), turns ? 0 : at.output + 1};
  }
  __device__ bool begins_output(At at) const { return routes.sums == 1 || at.place == 0; }
  __device__ bool ends_output(At at) const { return routes.sums == 1 || at.place == routes.sums - 1; }

  /// What is added to the number of a tile of N-tile `group`, which is at `at`. By a whole warp.
  __device__ int tiles_before(const Launch& args, int group, At at) const {
    if (routes.places == 0) return 0;
    return (__shfl_sync(0xFFFFFFFFu, expert, at.place) * routes.groups + at.output - group) * args.k_tiles;
  }
  /// What is added to the activations' pointer.
  __device__ int64_t inputs_before(At at) const { return at.place * routes.x_stride; }
  /// What products count in a sum. By a whole warp.
  __device__ float share_of(At at) const { return routes.sums > 1 ? __shfl_sync(0xFFFFFFFFu, share, at.place) : 1.0f; }
};

/// The bias of an output: that of the expert of its place, or the sum of those of all.
__device__ __forceinline__ float bias_of(const RoutedLaunch& args, int row) {
  if (args.routes.places == 0) return __ldg(args.bias + row);
  const Places& places = places_here();
  const int n = 64 * args.routes.groups;
  if (args.routes.sums == 1) return __ldg(args.bias + int64_t{places.experts[row / n]} * n + row % n);
  float sum = 0;
#pragma unroll 1
  for (int place = 0; place < args.routes.places; ++place) {
    sum += places.shares[place] * __ldg(args.bias + int64_t{places.experts[place]} * n + row);
  }
  return sum;
}

/// Brings the codes that the launch behind this one reads of the same experts to the L2 cache, 4 KB for each warp.
class ExpertFetch {
 public:
  /// Where this lane's line stands, before the experts are known.
  __device__ ExpertFetch(const RoutedLaunch& args, int warp, int warps) : codes_(args.next_codes.codes) {
    if (codes_ == nullptr) return;
    const int each = static_cast<int>(args.next_codes.bytes / line);
    const int at = (static_cast<int>(blockIdx.x) * warps + warp) * 32 + static_cast<int>(threadIdx.x) % 32;
    place_ = at / each;
    codes_ += int64_t{at - place_ * each} * line;
    if (place_ >= args.routes.places) codes_ = nullptr;
  }
  __device__ void operator()(const RoutedLaunch& args) const {
    if (codes_ == nullptr) return;
    const char* const from = codes_ + places_here().experts[place_] * args.next_codes.bytes;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }

 private:
  static constexpr int line = 128;
  const char* codes_;
  int place_ = 0;
};

}  // namespace w4q::kernels::frame
