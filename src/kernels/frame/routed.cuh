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

/// How a compact kernel is cut: its runs are whole units of 1 << unit_shift tiles, which divide k_tiles. What it would divide
/// for before it can ask for a weight is known to the host.
struct CompactCut {
  int unit_shift = 0;
  Partition units;                ///< over blocks
  Divider k_tiles, output_tiles;  ///< by tiles of an N-tile, and of an output's N-tiles together
  Divider inner;                  ///< by N-tiles that follow one another in what Router::at() counts first
};

struct RoutedLaunch : Launch {
  RouteArgs choice;           ///< logits null: the experts of `routes` have been chosen
  ExpertPrefetch next_codes;  ///< null: nothing to fetch
  CompactCut cut = {};        ///< of a compact kernel
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

/// What does not exist: experts without a logit.
inline constexpr int lowest_key = -0x7FFFFFFF;

/// A logit as an integer of the same order, above the least; zeros are equal, and what is no number is some integer.
__device__ __forceinline__ int order_key(float logit) {
  const int bits = __float_as_int(logit + 0.0f);
  return max(bits ^ (bits >> 31 & 0x7FFFFFFF), lowest_key);
}

/// How many of `count` keys, a multiple of four, come before number `own` of them: larger ones, and of equals the first.
__device__ __forceinline__ int rank_of(const int4* keys, int count, int own) {
  const int mine = reinterpret_cast<const int*>(keys)[own], chunk = own / 4;
  int rank = 0;
#pragma unroll 4
  for (int i = 0; i < count / 4; ++i) {
    const int4 four = keys[i];
    const int least = mine - (i < chunk ? 1 : 0);  // equals in front come before
    rank += (four.x > least ? 1 : 0) + (four.y > least ? 1 : 0) + (four.z > least ? 1 : 0) + (four.w > least ? 1 : 0);
  }
  const int4 four = keys[chunk];
  rank += (own % 4 > 0 && four.x == mine ? 1 : 0) + (own % 4 > 1 && four.y == mine ? 1 : 0);
  return rank + (own % 4 > 2 && four.z == mine ? 1 : 0);
}

/// A token's choice of experts, as route_kernel makes it, a thread for each expert: every warp finds the best of its 32, and
/// of those of all warps the best are chosen. Shares wait until the block has asked for its weights: a softmax, a sigmoid and
/// a positive factor do not change who is chosen.
template <int threads>
struct Choosing {
  static_assert(threads >= most_experts_chosen_by_product);
  const RouteArgs& args;
  float* const logits;  ///< in shared memory: as they were read

  __device__ explicit Choosing(const RouteArgs& route) : args(route), logits(buffer()) {}

  /// Into places. By the whole block.
  __device__ __forceinline__ void choose(Places& places) const {
    const int thread = static_cast<int>(threadIdx.x);
    const bool exists = thread < args.experts;
    const float logit = args.parts != nullptr ? sum_of_parts(thread)
                        : exists              ? __ldcg(args.logits + thread)
                                              : -INFINITY;
    float mine = logit;
    if (args.correction != nullptr || args.bias != nullptr) {
      mine = completed(logit, thread, exists, args.input_norm != nullptr ? norm_factor(args) : 1.0f);
      if (args.correction != nullptr && exists) {
        mine = 1.0f / (1.0f + expf(-mine)) + __ldg(args.correction + thread);  // of sigmoids only
      }
    }
    logits[thread] = logit;
    Candidates& best = candidates();
    const int warp = thread / 32, lane = thread % 32, count = (args.experts + 31) / 32 * args.chosen;
    best.all[thread] = exists ? order_key(mine) : lowest_key;
    if (thread < 4) best.keys[count + thread] = lowest_key;
    if (thread < most_routed_places) {
      places.experts[thread] = args.joined && thread == args.chosen ? args.experts : 0;
    }
    __syncwarp();
    if (32 * warp < args.experts) {
      const int rank = rank_of(reinterpret_cast<const int4*>(best.all + 32 * warp), 32, lane);
      if (rank < args.chosen) {
        best.keys[warp * args.chosen + rank] = best.all[thread];
        best.experts[warp * args.chosen + rank] = thread;
      }
    }
    __syncthreads();
    if (thread < count) {
      const int rank = rank_of(reinterpret_cast<const int4*>(best.keys), (count + 3) / 4 * 4, thread);
      if (rank < args.chosen) places.experts[rank] = best.experts[thread];
    }
    __syncthreads();
  }

  /// Leaves experts and shares for the launches behind, and what stands behind the logits. By a whole warp, once.
  __device__ __forceinline__ void leave(const Places& places) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float factor = args.input_norm != nullptr ? norm_factor(args) : 1.0f;
    const Softmax softmax(*this, factor);
    const int expert = places.experts[lane];
    const bool chosen = lane < args.chosen, joins = args.joined && lane == args.chosen;
    float share = chosen ? score(completed(logits[expert], expert, true, factor), softmax) : 0.0f;
    const float total = warp_sum(share);
    share *= args.scale / (args.renormalizes && total > 0 ? total : 1.0f);
    if (chosen && args.expert_scale != nullptr) share *= __ldg(args.expert_scale + expert);
    if (joins) share = share_of_joined(args, factor);
    __syncwarp();
    if (args.input_norm != nullptr) {
#pragma unroll 1
      for (int64_t i = args.experts + lane; i < args.stride; i += 32) args.logits[i] *= factor;
    }
    if (chosen || joins) args.places[lane] = expert, args.shares[lane] = share;
    __threadfence();  // the launch behind may read them before this one is done
  }

 private:
  /// Probabilities are the exponential of logits − largest, over the sum of all. By a whole warp.
  struct Softmax {
    float largest = -INFINITY, sum = 0;

    __device__ __forceinline__ Softmax(const Choosing& all, float factor) {
      if (all.args.sigmoid) return;
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
      for (int i = lane; i < all.args.experts; i += 32) {
        largest = fmaxf(largest, all.completed(all.logits[i], i, true, factor));
      }
      largest = warp_max(largest);
#pragma unroll 1
      for (int i = lane; i < all.args.experts; i += 32) {
        sum += expf(all.completed(all.logits[i], i, true, factor) - largest);
      }
      sum = warp_sum(sum);
    }
  };

  __device__ static float* buffer() {
    __shared__ float values[threads];
    return values;
  }
  /// The best of each 32 experts, warp by warp, best first: of equal keys the first expert's stands in front.
  struct Candidates {
    alignas(16) int all[threads];
    alignas(16) int keys[threads + 4];
    int experts[threads];
  };
  __device__ static Candidates& candidates() {
    __shared__ Candidates values;
    return values;
  }
  /// Also of what stands behind the experts. The last block leaves sums where logits are read later.
  __device__ __forceinline__ float sum_of_parts(int output) const {
    const int stride = static_cast<int>(args.stride);
    if (output >= stride) return -INFINITY;
    constexpr int at_once = 32;
    float sums[4] = {};  // side by side: an addition waits for the one before it
    const float* from = args.parts + output;
#pragma unroll 1
    for (int left = args.part_count; left > 0; left -= at_once) {
      float values[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i, from += stride) values[i] = i < left ? __ldcg(from) : 0.0f;
#pragma unroll
      for (int i = 0; i < at_once; ++i) sums[i % 4] += values[i];
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (args.bias != nullptr && output < args.experts) sum += __ldg(args.bias + output);
    if (blockIdx.x + 1 == gridDim.x) args.logits[output] = sum;
    return output < args.experts ? sum : -INFINITY;
  }
  __device__ __forceinline__ float completed(float logit, int expert, bool exists, float factor) const {
    const float bias = exists && args.input_norm != nullptr && args.bias != nullptr ? __ldg(args.bias + expert) : 0.0f;
    return (logit - bias) * factor + bias;
  }
  __device__ __forceinline__ float score(float logit, const Softmax& softmax) const {
    return args.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - softmax.largest) / softmax.sum;
  }
};

/// Fills places_here(), once they can be known. By the whole block.
template <int threads>
__device__ __forceinline__ void find_places(const RoutedLaunch& args) {
  Places& places = places_here();
  if (args.choice.logits != nullptr) return Choosing<threads>(args.choice).choose(places);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < args.routes.places) {
    places.experts[thread] = __ldcg(args.routes.experts + thread);
    places.shares[thread] = args.routes.shares != nullptr ? __ldcg(args.routes.shares + thread) : 1.0f;
  }
  __syncthreads();
}

/// Of a launch that chooses: lets the launch behind begin, which reads the choice at once. One warp of the block that has
/// least to do leaves it, while the others multiply.
template <int threads>
__device__ __forceinline__ void leave_choice(const RoutedLaunch& args) {
  if (blockIdx.x + 1 == gridDim.x) {
    if (threadIdx.x / 32 + 1 != threads / 32) return;
    Choosing<threads>(args.choice).leave(places_here());
  }
  device::trigger_dependent_launch();
}

/// N-tiles of all places of an output, or of all outputs of a place.
__host__ __device__ inline int inner_of(const Routes& routes) { return routes.sums > 1 ? routes.sums : routes.groups; }

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
    return at(group, [](int number, int by) { return number / by; });
  }
  /// quotient(number, by) divides.
  template <class Quotient>
  __device__ At at(int group, const Quotient& quotient) const {
    if (routes.places == 0) return {0, group};
    const int inner = inner_of(routes), outer = quotient(group, inner), rest = group - outer * inner;
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
    const int at = (static_cast<int>(blockIdx.x) * warps + warp) * 32 + static_cast<int>(threadIdx.x) % 32;
    place_ = args.next_codes.by_lines.quotient(at);
    codes_ += at * int64_t{line} - place_ * args.next_codes.bytes;
    if (place_ >= args.routes.places) codes_ = nullptr;
  }
  __device__ void operator()(const RoutedLaunch& args) const {
    if (codes_ == nullptr) return;
    const char* const from = codes_ + places_here().experts[place_] * args.next_codes.bytes;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }

 private:
  static constexpr int line = ExpertPrefetch::line;
  const char* codes_;
  int place_ = 0;
};

}  // namespace w4q::kernels::frame
