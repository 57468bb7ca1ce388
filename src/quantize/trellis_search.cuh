// The search for the symbols of a ring on the GPU: the bits of formats::TrellisSearch (class E0), since every operation
// is rounded as there and ties go the same way (docs/trellis.md, "On the GPU"). A thread block has a ring.
//
// A tile is 64 levels: those on all ways into 64 / 2^bits groups that stand one behind the other. A thread keeps the
// levels of its tiles in registers for as long as it lives; the costs of groups are a row in shared memory. Some rows go to
// global memory, for the way back: between two of them the costs of the few groups that could lead to a state are made again.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "formats/trellis.h"

namespace w4q::quantize::cuda {

using formats::trellis_rows;

inline constexpr int search_threads = 512;  ///< at most
inline constexpr int tile_levels = 64;
/// Weights on either side of the seam that decide the state there (formats/trellis_search.cpp).
inline constexpr int search_seam = 48;
/// Edges that are asked about at once on the way back.
inline constexpr int search_edges = 512;

/// Steps of the way back from a kept row to the next: 2^(bits · steps) edges, and groups by what they do not share.
W4Q_HOST_DEVICE constexpr int kept_distance(int bits, int window) noexcept {
  int steps = 1;
  while (1 << bits * (steps + 1) <= search_edges && bits * (steps + 2) <= window) ++steps;
  return steps;
}
/// Rows of costs that a block has in global memory: kept ones, and one for what does not fit shared memory twice.
W4Q_HOST_DEVICE constexpr int kept_rows(int bits, int window) noexcept {
  return trellis_rows / kept_distance(bits, window) + 2;
}
/// Two tiles of two bits: a row of costs takes half of what a block may have of shared memory.
W4Q_HOST_DEVICE constexpr bool one_row(int bits, int tiles) noexcept { return bits == 2 && tiles == 2; }

enum class WeightKind : uint8_t { counts, free, zero };

/// What the threads of a search have in common.
struct SearchShared {
  float targets[trellis_rows];
  WeightKind kinds[trellis_rows];
  uint16_t states[trellis_rows];  ///< behind each weight: the result
  float edges[2 * search_edges];  ///< costs, from the farthest back; then those one step nearer …
  uint8_t ways[2 * search_edges];
  unsigned long long cheapest[search_threads / 32];
};

__device__ inline float level_of(uint32_t state) { return static_cast<float>(formats::trellis_level(state)); }

/// Levels of a tile, in registers: whole, or two in one, which takes another instruction for each.
template <bool whole>
class TileLevels {
 public:
  __device__ float operator[](int i) const {
    if constexpr (whole) return values_[i];
    return i % 2 == 0 ? __low2float(pairs_[i / 2]) : __high2float(pairs_[i / 2]);
  }
  __device__ void set(int i, float level) {
    if constexpr (whole) {
      values_[i] = level;
    } else if (i % 2 == 0) {
      pairs_[i / 2] = __floats2half2_rn(level, 0);
    } else {
      pairs_[i / 2] = __halves2half2(__low2half(pairs_[i / 2]), __float2half_rn(level));
    }
  }
  /// Keeps the compiler from unpacking pairs once for all steps, for which there are no registers.
  __device__ void hold() {
    if constexpr (!whole) {
#pragma unroll
      for (__half2& pair : pairs_) asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(pair)));
    }
  }

 private:
  float values_[whole ? tile_levels : 1];
  __half2 pairs_[whole ? 1 : tile_levels / 2];
};

template <int bits, int tiles>
class RingSearch {
 public:
  static constexpr int ways = 1 << bits;
  static constexpr int tile_groups = tile_levels / ways;
  static constexpr int tile_origins = (tile_groups >> bits) > 1 ? tile_groups >> bits : 1;
  static constexpr bool in_place = one_row(bits, tiles);

  /// `rows`: 2^(window − bits) floats of shared memory, twice unless in_place; `kept` [kept_rows, groups].
  __device__ RingSearch(int window, SearchShared& shared, float* rows, float* kept)
      : window_(window),
        groups_(1 << (window - bits)),
        distance_(kept_distance(bits, window)),
        shared_(shared),
        rows_(rows),
        kept_(kept) {
    set_levels(0, first_);
    if constexpr (tiles == 2) set_levels(1, second_);
  }

  /// From targets and kinds of a column of which `rows` exist to states. Ends and begins behind a barrier.
  __device__ void operator()(int rows) {
    constexpr int seam = trellis_rows - search_seam;
    const bool open = (trellis_rows - rows) * bits >= window_;
    Path path = open ? Path{0, rows, 0, 0} : Path{seam, 2 * search_seam, -1, search_seam - 1};
#pragma unroll 1
    for (bool last = open;; last = true) {
      forward(path);
      const bool closed = last && !open;
      const uint32_t end = closed ? static_cast<uint32_t>(path.start) : cheapest(path);
      backward(path, end);
      if (last) return;
      path = {0, trellis_rows, static_cast<int>(shared_.states[trellis_rows - 1]), 0};
    }
  }

 private:
  static constexpr float never = INFINITY;
  using First = TileLevels<!in_place>;
  using Second = TileLevels<false>;
  /// `count` weights from ring position `first` on, from state `start` or, negative, any; the states behind them are
  /// wanted from the `until`th on.
  struct Path {
    int first, count, start, until;

    __device__ int at(int step) const { return (first + step) % trellis_rows; }
  };
  /// Costs of the groups that a tile's come from.
  struct Spent {
    float of[ways][tile_origins];
  };

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  /// The first group of a tile.
  __device__ static int group_of(int tile) { return (tile * threads() + thread()) * tile_groups; }

  template <class Levels>
  __device__ void set_levels(int tile, Levels& levels) {
#pragma unroll
    for (int i = 0; i < tile_levels; ++i) {
      levels.set(i, level_of(static_cast<uint32_t>(i / tile_groups * groups_ + group_of(tile) + i % tile_groups)));
    }
  }

  __device__ float cost(int at, uint32_t state) const {
    if (shared_.kinds[at] == WeightKind::free) return 0;
    if (shared_.kinds[at] == WeightKind::zero) return state % ways == 0 ? 0 : never;
    const float off = level_of(state) - shared_.targets[at];
    return off * off;
  }

  // ---- forward: the row of costs behind one weight after the other --------------------------------------------------

  /// Leaves the row in front of the last weight in last_.
  __device__ void forward(const Path& path) {
    const int from = path.until / distance_ * distance_;
    for (int g = thread(); g < groups_; g += threads()) {
      const float value = path.start < 0 || g == path.start % groups_ ? 0.0f : never;
      rows_[g] = value;
      if (from == 0) kept_[g] = value;
    }
    __syncthreads();
    float *least = rows_, *next = in_place ? rows_ : rows_ + groups_;
    for (int step = 1, left = distance_; step < path.count; ++step) {
      float* keep = nullptr;
      if (--left == 0) left = distance_, keep = step < from ? nullptr : kept_ + step / distance_ * groups_;
      const int at = path.at(step - 1);
      if (shared_.kinds[at] == WeightKind::counts) {
        advance(least, shared_.targets[at], next, keep);
      } else {
        pass(shared_.kinds[at], least, next, keep);
      }
      __syncthreads();
      float* const done = least;
      least = next;
      next = done;
    }
    last_ = least;
  }

  /// next[g] = min over ways of least[p >> bits] + (level(p) − target)².
  __device__ void advance(const float* least, float target, float* next, float* keep) {
    first_.hold();
    if constexpr (tiles == 2) second_.hold();
    if constexpr (in_place) {
      const Spent first = load(least, 0), second = load(least, 1);
      __syncthreads();
      decide(0, first_, first, target, next, keep);
      decide(1, second_, second, target, next, keep);
    } else {
      if (tiles == 1 && group_of(0) >= groups_) return;
      decide(0, first_, load(least, 0), target, next, keep);
      if constexpr (tiles == 2) decide(1, second_, load(least, 1), target, next, keep);
    }
  }

  __device__ Spent load(const float* least, int tile) const {
    Spent spent;
    const int origin = group_of(tile) >> bits;
#pragma unroll
    for (int way = 0; way < ways; ++way) {
      const float* const from = least + way * (groups_ / ways) + origin;
      if constexpr (tile_origins % 4 == 0) {
#pragma unroll
        for (int i = 0; i < tile_origins; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + i);
          spent.of[way][i] = four.x, spent.of[way][i + 1] = four.y;
          spent.of[way][i + 2] = four.z, spent.of[way][i + 3] = four.w;
        }
      } else {
        static_assert(tile_origins == 1);
        spent.of[way][0] = *from;
      }
    }
    return spent;
  }

  template <class Levels>
  __device__ void decide(int tile, const Levels& levels, const Spent& spent, float target, float* next, float* keep) {
    static_assert(tile_groups % 4 == 0);
    const int group = group_of(tile);
#pragma unroll
    for (int four = 0; four < tile_groups; four += 4) {
      float best[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int way = 0; way < ways; ++way) {
          const float off = __fsub_rn(levels[way * tile_groups + four + i], target);
          const float cost = __fadd_rn(spent.of[way][(four + i) >> bits], __fmul_rn(off, off));
          best[i] = way == 0 ? cost : fminf(best[i], cost);
        }
      }
      const float4 found = make_float4(best[0], best[1], best[2], best[3]);
      *reinterpret_cast<float4*>(next + group + four) = found;
      if (keep != nullptr) *reinterpret_cast<float4*>(keep + group + four) = found;
    }
  }

  /// The same for a weight that does not count, or whose symbol is zero.
  __device__ void pass(WeightKind kind, const float* least, float* next, float* keep) {
    float* const aside = in_place ? kept_ + (kept_rows(bits, window_) - 1) * groups_ : next;
    for (int g = thread(); g < groups_; g += threads()) {
      float best = never;
      for (int way = 0; way < ways && (kind == WeightKind::free || g % ways == 0); ++way) {
        best = fminf(best, least[(way * groups_ + g) >> bits]);
      }
      aside[g] = best;
      if (keep != nullptr) keep[g] = best;
    }
    if constexpr (in_place) {
      __syncthreads();
      for (int g = thread(); g < groups_; g += threads()) next[g] = aside[g];
    }
  }

  // ---- backward: which way it was -----------------------------------------------------------------------------------

  /// The state with the least cost behind the last weight; ties to the lowest. Positive floats order as
  /// integers, and the state stands below them.
  __device__ uint32_t cheapest(const Path& path) {
    const int at = path.at(path.count - 1);
    unsigned long long best = ~0ull;
    for (int state = thread(); state < 1 << window_; state += threads()) {
      const float cost = last_[state >> bits] + this->cost(at, static_cast<uint32_t>(state));
      const unsigned long long key = static_cast<unsigned long long>(__float_as_uint(cost)) << 32 | unsigned(state);
      best = key < best ? key : best;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const unsigned long long other = __shfl_xor_sync(~0u, best, step);
      best = other < best ? other : best;
    }
    if (thread() % 32 == 0) shared_.cheapest[thread() / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < threads() / 32; ++warp) {
      best = shared_.cheapest[warp] < best ? shared_.cheapest[warp] : best;
    }
    return static_cast<uint32_t>(best);
  }

  /// The states behind a path's weights, the last of them `state`.
  __device__ void backward(const Path& path, uint32_t state) {
    int top = path.count - 1;
    if (thread() == 0) shared_.states[path.at(top)] = static_cast<uint16_t>(state);
    while (top > path.until) {
      const int base = (top - 1) / distance_ * distance_;
      state = piece(path.first + base, top - base, kept_ + base / distance_ * groups_, state);
      top = base;
    }
    __syncthreads();
  }

  /// Finds the states `depth` steps back from `state`, from the row of costs in front of the first of these weights, at
  /// `at`. A node stands for the ways that lead from it, the last one lowest; its group is
  /// node << (window − bits − bits · steps) | group >> bits · steps.
  __device__ uint32_t piece(int at, int depth, const float* row, uint32_t state) {
    const uint32_t group = state >> bits;
    const auto group_at = [&](int steps, int node) {
      return static_cast<uint32_t>(node) << (window_ - bits - bits * steps) | group >> bits * steps;
    };
    // Costs over edges from `steps` back: of node << bits·(steps − 1) … is the way from there.
    const auto edge = [&](int steps, int node, float least) {
      const int nearer = node & ((1 << bits * (steps - 1)) - 1), way = node >> bits * (steps - 1);
      const uint32_t from = static_cast<uint32_t>(way * groups_) | group_at(steps - 1, nearer);
      return least + cost((at + depth - steps) % trellis_rows, from);
    };
    float* edges = shared_.edges;
    uint8_t* ways_of = shared_.ways;
    for (int node = thread(); node < 1 << bits * depth; node += threads()) {
      edges[node] = edge(depth, node, __ldcg(row + group_at(depth, node)));
    }
    __syncthreads();
    for (int steps = depth - 1; steps >= 0; --steps) {
      const int nodes = 1 << bits * steps;
      float* const nearer = edges + (nodes << bits);
      for (int node = thread(); node < nodes; node += threads()) {
        float least = never;
        int way = 0;
        for (int other = 0; other < ways; ++other) {
          const float cost = edges[other * nodes + node];
          if (cost < least) least = cost, way = other;
        }
        ways_of[node] = static_cast<uint8_t>(way);
        if (steps > 0) nearer[node] = edge(steps, node, least);
      }
      __syncthreads();
      edges = nearer;
      ways_of += nodes;
    }
    uint32_t found = state;
    for (int steps = 0, node = 0; steps < depth; ++steps) {
      ways_of -= 1 << bits * steps;
      const int way = ways_of[node];
      found = static_cast<uint32_t>(way * groups_) | found >> bits;
      node |= way << bits * steps;
      if (thread() == 0) shared_.states[(at + depth - 1 - steps) % trellis_rows] = static_cast<uint16_t>(found);
    }
    __syncthreads();
    return found;
  }

  int window_, groups_, distance_;
  SearchShared& shared_;
  float *rows_, *kept_;
  const float* last_ = nullptr;
  First first_;
  Second second_;
};

}  // namespace w4q::quantize::cuda
