// The search for the symbols of a ring on the GPU: the bits of formats::TrellisSearch (class E0), since every operation
// is rounded as there and ties go the same way (docs/trellis.md, "On the GPU"). A thread block has a ring, or the blocks of a cluster have it together.
//
// A tile is 64 levels: those on all ways into 64 / 2^bits groups that stand one behind the other. A thread keeps the
// levels of its tiles in registers for as long as it lives, some of them packed; the costs of groups are a row in shared memory. Some rows go to
// global memory, for the way back: between two of them the costs of the few groups that could lead to a state are made again.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/cluster.cuh"
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
/// Tiles of a thread where the window is the widest, 16 bits, and no others of a cluster share them; otherwise it has
/// one.
inline constexpr int most_tiles = 2;
W4Q_HOST_DEVICE constexpr int search_tiles(int window) noexcept {
  return window == formats::trellis_max_window ? most_tiles : 1;
}
/// At least a warp: where there are fewer tiles, some threads have none.
W4Q_HOST_DEVICE constexpr int search_block(int window) noexcept {
  const int threads = (1 << window) / tile_levels / search_tiles(window);
  return threads < 32 ? 32 : threads;
}
/// At 16 bits, two of them a weight's, a row of costs takes two thirds of what a block may have of shared memory; those
/// of a cluster, which newer GPUs have, may have more.
W4Q_HOST_DEVICE constexpr bool one_row(int bits, int tiles) noexcept { return bits == 2 && tiles == most_tiles; }
/// Tiles whose levels are not packed: what registers hold.
W4Q_HOST_DEVICE constexpr int whole_tiles(int bits, int tiles) noexcept {
  return tiles < most_tiles ? tiles : one_row(bits, tiles) ? 0 : 1;
}
/// Threads of each of the blocks of a cluster that have a ring together, with a tile each.
W4Q_HOST_DEVICE constexpr int cluster_threads(int blocks) noexcept {
  return (1 << formats::trellis_max_window) / tile_levels / blocks;
}

enum class WeightKind : uint8_t { counts, free, zero };

/// What the threads of a search have in common.
struct SearchShared {
  float targets[trellis_rows];
  WeightKind kinds[trellis_rows];
  uint16_t states[trellis_rows];                     ///< behind each weight: the result
  float edges[2 * search_edges];                     ///< costs, from the farthest back; then those one step nearer …
  uint16_t origins[2 * search_edges];                ///< from which nodes their costs come, farthest back
  uint16_t origin;                                   ///< of the last of them
  unsigned long long cheapest[search_threads / 16];  ///< of the warps of all blocks
};

/// formats::trellis_level().
__device__ inline float level_of(uint32_t state) {
  const uint32_t bytes = __dp4a(state * formats::trellis_multiplier, 0x01010101u, 0u);
  return static_cast<float>(static_cast<int>(bytes) - formats::trellis_largest_level);
}
/// Begins to bring the line of `address` to the L2 cache.
__device__ inline void fetch_soon(const float* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

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

/// The lesser of three costs, none of them negative: as integers they have the same order.
__device__ inline float least_of(float a, float b, float c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
#else
  return fminf(fminf(a, b), c);
#endif
}

/// `blocks` of a cluster have a tile for each of their threads, and of the costs those that their tiles come from.
template <int bits, int tiles, int blocks>
class RingSearch {
 public:
  static constexpr int ways = 1 << bits;
  static constexpr int tile_groups = tile_levels / ways;
  static constexpr int tile_origins = (tile_groups >> bits) > 1 ? tile_groups >> bits : 1;
  static constexpr bool in_place = one_row(bits, tiles);

  /// `rows`: 2^(window − bits) floats of shared memory, twice unless in_place; `kept` [kept_rows, groups].
  __device__ RingSearch(int window, SearchShared& shared, float* rows, float* kept)
      : narrow_(window),
        distance_(kept_distance(bits, this->window())),
        rank_(blocks > 1 ? device::cluster_rank() : 0),
        shared_(shared),
        rows_(rows),
        kept_(kept) {
    for_tiles([&](auto tile, auto& levels) {
#pragma unroll
      for (int i = 0; i < tile_levels; ++i) {
        levels.set(i, level_of(static_cast<uint32_t>(i / tile_groups * groups() + group_of(tile) + i % tile_groups)));
      }
    });
  }

  /// From targets and kinds of a column of which `rows` exist to states, in every block. Ends and begins behind a barrier.
  __device__ void operator()(int rows) {
    constexpr int seam = trellis_rows - search_seam;
    const bool open = (trellis_rows - rows) * bits >= window();
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
  static constexpr int whole = whole_tiles(bits, tiles);
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
  __device__ int group_of(int tile) const { return ((rank_ * tiles + tile) * threads() + thread()) * tile_groups; }
  /// Where the costs of a tile's groups are wanted next.
  __device__ float* home(float* row, int group) const {
    if constexpr (blocks == 1) return row + group;
    const int origins = groups() / ways;
    return device::of_cluster_block(row, group % origins / (origins / blocks)) + group;
  }
  /// Where a kept row has the cost of a group: those that a piece of the way back may come from stand together.
  __device__ int kept_at(int group) const {
    const int shift = window() - bits - bits * distance_;
    return (group & ((1 << shift) - 1)) << bits * distance_ | group >> shift;
  }
  /// Of all threads that have a ring.
  __device__ static void barrier() {
    if constexpr (blocks == 1) {
      __syncthreads();
    } else {
      device::cluster_barrier();
    }
  }

  /// A constant where threads have several tiles.
  __device__ int window() const { return tiles * blocks > 1 ? formats::trellis_max_window : narrow_; }
  __device__ int groups() const { return 1 << (window() - bits); }

  /// body(number of the tile, its levels) for all of a thread's.
  template <class Body>
  __device__ void for_tiles(const Body& body) {
#pragma unroll
    for (int tile = 0; tile < whole; ++tile) body(tile, whole_[tile]);
#pragma unroll
    for (int tile = whole; tile < tiles; ++tile) body(tile, packed_[tile - whole]);
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
    for (int g = thread(); g < groups(); g += threads()) {
      const float value = path.start < 0 || g == path.start % groups() ? 0.0f : never;
      rows_[g] = value;
      if (from == 0) kept_[kept_at(g)] = value;
    }
    barrier();
    float *least = rows_, *next = in_place ? rows_ : rows_ + groups();
    float* kept = kept_;
    for (int step = 1, left = distance_; step < path.count; ++step) {
      float* keep = nullptr;
      if (--left == 0) {
        left = distance_;
        kept += groups();
        if (step >= from) keep = kept;
      }
      const int at = path.at(step - 1);
      if (shared_.kinds[at] == WeightKind::counts) {
        advance(least, shared_.targets[at], next, keep);
      } else {
        pass(shared_.kinds[at], least, next, keep);
      }
      barrier();
      float* const done = least;
      least = next;
      next = done;
    }
    last_ = least;
  }

  /// next[g] = min over ways of least[p >> bits] + (level(p) − target)².
  __device__ void advance(const float* least, float target, float* next, float* keep) {
    for_tiles([](int, auto& levels) { levels.hold(); });
    if constexpr (in_place) {
      Spent spent[tiles];
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) spent[tile] = load(least, tile);
      __syncthreads();
      for_tiles([&](int tile, const auto& levels) { decide(tile, levels, spent[tile], target, next, keep); });
    } else {
      if (tiles * blocks == 1 && group_of(0) >= groups()) return;
      for_tiles([&](int tile, const auto& levels) { decide(tile, levels, load(least, tile), target, next, keep); });
    }
  }

  __device__ Spent load(const float* least, int tile) const {
    Spent spent;
    const int origin = group_of(tile) >> bits;
#pragma unroll
    for (int way = 0; way < ways; ++way) {
      const float* const from = least + way * (groups() / ways) + origin;
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
    float* const to = home(next, group);
#pragma unroll
    for (int four = 0; four < tile_groups; four += 4) {
      float best[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int way = 0; way < ways; way += 2) {
          const auto cost = [&](int of) {
            const float off = __fsub_rn(levels[of * tile_groups + four + i], target);
            return __fadd_rn(spent.of[of][(four + i) >> bits], __fmul_rn(off, off));
          };
          best[i] = way == 0 ? fminf(cost(0), cost(1)) : least_of(best[i], cost(way), cost(way + 1));
        }
      }
      const float4 found = make_float4(best[0], best[1], best[2], best[3]);
      *reinterpret_cast<float4*>(to + four) = found;
      if (keep != nullptr) keep_four(keep, group, four, best);
    }
  }

  /// At the widest window groups of a tile stand at a distance that is a constant.
  __device__ void keep_four(float* keep, int group, int four, const float (&costs)[4]) const {
    constexpr bool even = tiles * blocks > 1;
    constexpr int distance = 1 << bits * kept_distance(bits, formats::trellis_max_window);
#pragma unroll
    for (int i = four; i < four + 4; ++i) {
      keep[even ? kept_at(group) + i * distance : kept_at(group + i)] = costs[i - four];
    }
  }

  /// The same for a weight that does not count, or whose symbol is zero.
  __device__ void pass(WeightKind kind, const float* least, float* next, float* keep) {
    float* const aside = kept_ + (kept_rows(bits, window()) - 1) * groups();
#pragma unroll 1
    for (int i = 0; i < tiles * tile_groups && group_of(i / tile_groups) < groups(); ++i) {
      const int g = group_of(i / tile_groups) + i % tile_groups;
      float best = never;
#pragma unroll 1
      for (int way = 0; way < ways && (kind == WeightKind::free || g % ways == 0); ++way) {
        best = fminf(best, least[(way * groups() + g) >> bits]);
      }
      *(in_place ? aside + g : home(next, g)) = best;
      if (keep != nullptr) keep[kept_at(g)] = best;
    }
    if constexpr (in_place) {
      __syncthreads();
      for (int g = thread(); g < groups(); g += threads()) next[g] = aside[g];
    }
  }

  // ---- backward: which way it was -----------------------------------------------------------------------------------

  /// The state with the least cost behind the last weight; ties to the lowest. Positive floats order as
  /// integers, and the state stands below them.
  __device__ uint32_t cheapest(const Path& path) {
    const int at = path.at(path.count - 1);
    unsigned long long best = ~0ull;
    const int origins = groups() / ways / blocks;  // of this block
    for (int i = thread(); i < (1 << window()) / blocks; i += threads()) {
      const int from = i / ways / origins * (origins * blocks) + rank_ * origins + i / ways % origins;
      const int state = from * ways + i % ways;
      const float cost = last_[state >> bits] + this->cost(at, static_cast<uint32_t>(state));
      const unsigned long long key = static_cast<unsigned long long>(__float_as_uint(cost)) << 32 | unsigned(state);
      best = key < best ? key : best;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const unsigned long long other = __shfl_xor_sync(~0u, best, step);
      best = other < best ? other : best;
    }
    const int warps = threads() / 32;
    for (int block = 0; block < blocks && thread() % 32 == 0; ++block) {
      unsigned long long* const of_warp = shared_.cheapest + rank_ * warps + thread() / 32;
      *(blocks == 1 ? of_warp : device::of_cluster_block(of_warp, block)) = best;
    }
    barrier();
    for (int warp = 0; warp < warps * blocks; ++warp) {
      best = shared_.cheapest[warp] < best ? shared_.cheapest[warp] : best;
    }
    return static_cast<uint32_t>(best);
  }

  /// The states behind a path's weights, the last of them `state`.
  __device__ void backward(const Path& path, uint32_t state) {
    int top = path.count - 1;
    fetch_rows(top, 2);
    if (thread() == 0) shared_.states[path.at(top)] = static_cast<uint16_t>(state);
    while (top > path.until) {
      const int base = (top - 1) / distance_ * distance_;
      fetch_rows(base - distance_, 1);
      state = piece(path.first + base, top - base, kept_ + base / distance_ * groups(), state);
      top = base;
    }
    barrier();  // others may still read the rows
  }

  /// The first kept rows in front of weight `top`: they may be in no cache any more.
  __device__ void fetch_rows(int top, int count) const {
    constexpr int line = 32;
    for (int row = (top - 1) / distance_; top > 0 && row >= 0 && count > 0; --row, --count) {
      for (int g = thread() * line; g < groups(); g += threads() * line) fetch_soon(kept_ + row * groups() + g);
    }
  }

  /// Finds the states `depth` steps back from `state`, from the row of costs in front of the first of these weights, at
  /// `at`. A node is the ways that lead back to it, the nearest lowest; its group is
  /// node << (window − bits − bits · steps) | group >> bits · steps.
  __device__ uint32_t piece(int at, int depth, const float* row, uint32_t state) {
    const uint32_t group = state >> bits;
    const auto group_at = [&](int steps, int node) {
      return static_cast<uint32_t>(node) << (window() - bits - bits * steps) | group >> bits * steps;
    };
    const auto state_at = [&](int steps, int node) {
      const int nearer = node & ((1 << bits * (steps - 1)) - 1), way = node >> bits * (steps - 1) & (ways - 1);
      return static_cast<uint32_t>(way * groups()) | group_at(steps - 1, nearer);
    };
    // With the weight that follows a node.
    const auto extend = [&](int steps, int node, float least) {
      return least + cost((at + depth - steps) % trellis_rows, state_at(steps, node));
    };
    for (int node = thread(); node < 1 << bits * depth; node += threads()) {
      shared_.edges[node] = extend(depth, node, __ldcg(row + kept_at(static_cast<int>(group_at(depth, node)))));
    }
    __syncthreads();
    if (thread() < 32) {
      float* edges = shared_.edges;
      uint16_t* origins = shared_.origins;
      for (int steps = depth - 1; steps >= 0; --steps) {
        const int nodes = 1 << bits * steps;
        for (int node = thread(); node < nodes; node += 32) {
          float costs[ways];
#pragma unroll
          for (int way = 0; way < ways; ++way) costs[way] = edges[way * nodes + node];
          float least = costs[0];
#pragma unroll
          for (int way = 1; way < ways; ++way) least = fminf(least, costs[way]);
          int best = 0;
#pragma unroll
          for (int way = ways - 1; way >= 0; --way) best = costs[way] == least ? way : best;
          const int from = best * nodes + node, origin = steps == depth - 1 ? from : origins[from];
          if (steps == 0) {
            shared_.origin = static_cast<uint16_t>(origin);
          } else {
            origins[nodes * ways + node] = static_cast<uint16_t>(origin);
            edges[nodes * ways + node] = extend(steps, node, least);
          }
        }
        __syncwarp();
        edges += nodes * ways;
        origins += nodes * ways;
      }
    }
    __syncthreads();
    const int origin = shared_.origin;
    for (int steps = 1 + thread(); steps <= depth; steps += threads()) {
      shared_.states[(at + depth - steps) % trellis_rows] =
          static_cast<uint16_t>(state_at(steps, origin & ((1 << bits * steps) - 1)));
    }
    return state_at(depth, origin);
  }

  int narrow_;  ///< the window, where it is not the widest
  int distance_;
  int rank_;  ///< of the block in its cluster
  SearchShared& shared_;
  float *rows_, *kept_;
  const float* last_ = nullptr;
  TileLevels<true> whole_[whole > 0 ? whole : 1];
  TileLevels<false> packed_[tiles > whole ? tiles - whole : 1];
};

}  // namespace w4q::quantize::cuda
