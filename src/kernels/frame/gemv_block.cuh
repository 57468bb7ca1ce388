// What every GEMV on 64 × 64 tiles does around its main loop, whatever the weights are.
//
// Every warp of the grid works off one contiguous run of tiles, equal to ±1 tile; within a run the warp never waits for
// another. An N-tile (64 outputs × k) that lies in one run is stored straight from the registers. One that several
// warps share is summed at the end: in shared memory, warp by warp, and across blocks, in their order, by the block
// that holds its last tile. So the result is the same in every run of the program. Runs of a compact kernel are made of
// units of tiles that lie in one N-tile: where a run is one unit, all of it is asked for at once.
//
// Where launches may overlap, the next one fills its table and its ring of tiles on the multiprocessors that are done
// while others still compute.
#pragma once

#include "kernels/frame/fix_up.cuh"
#include "kernels/frame/routed.cuh"
#include "kernels/frame/tail_product.cuh"

namespace w4q::kernels::frame {

/// The table of a GEMV that looks nothing up: `stage_bytes` for what the block keeps there instead, until the tails
/// (`tail_bytes`) take its place.
template <int stage_bytes, int tail_bytes>
struct NoTable {
  static constexpr int total_bytes = stage_bytes > tail_bytes ? stage_bytes : tail_bytes;
  struct View {
    __device__ explicit View(const char*) {}
  };
  template <class Args>
  __device__ static void fill(char*, const Args&) {}
};

/// Brings 4 KB to the L2 cache where warp `warp` of this block will begin in a launch that is shaped like this one.
/// Launches that overlap begin by themselves.
template <int warps>
__device__ __forceinline__ void prefetch_next(const Launch& args, int warp) {
#if __CUDA_ARCH__ >= 900
  if (args.overlap) return;
#endif
  if (args.prefetch == nullptr) return;
  constexpr int line = 128;
  const int64_t lines = args.prefetch_bytes / line;
  const int64_t mine = lines * (int64_t{blockIdx.x} * warps + warp) / (int64_t{gridDim.x} * warps) + threadIdx.x % 32;
  if (mine < lines) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.prefetch + mine * line));
}

/// What a run that may be routed says of its N-tile; others have one N-tile an output.
template <bool routed, class Run>
__device__ __forceinline__ bool begins_output(const Run& run) {
  if constexpr (routed) return run.route.begins_output(run.place);
  return true;
}
template <bool routed, class Run>
__device__ __forceinline__ bool ends_output(const Run& run) {
  if constexpr (routed) return run.route.ends_output(run.place);
  return true;
}
template <bool routed, class Run>
__device__ __forceinline__ int output_of(const Run& run, int sums) {
  if constexpr (routed) return sums > 1 ? run.place.output : run.span.group;
  return run.span.group;
}
/// What blocks have of all tiles, and the warps of a block of its own.
template <bool compact, class Args>
__device__ __forceinline__ auto blocks_of(const Args& args) {
  if constexpr (compact)
    return UnitPartition{args.cut.units, args.cut.unit_shift};
  else
    return Partition(args.tiles, gridDim.x);
}
template <bool compact, int warps, class Args>
__device__ __forceinline__ auto runs_of(const Args& args, int tiles) {
  if constexpr (compact)
    return UnitPartition{Partition(tiles >> args.cut.unit_shift, warps), args.cut.unit_shift};
  else
    return Partition(tiles, warps);
}
template <bool compact, class Args, class Blocks>
__device__ __forceinline__ FixUp plan_of(const Args& args, int group_tiles, const Blocks& blocks) {
  if constexpr (compact)
    return FixUp(group_tiles, args.cut.output_tiles, blocks);
  else
    return FixUp(group_tiles, blocks);
}

/// The work of one block. `Gemv` has
///
///   fused                     whether it does what lies between products (gemv_store.cuh): one row
///   routed                    whether it may take some of many weights (Routes); may be left out: it does not
///   compact                   whether no N-tile lies in one run; may be left out: some do
///   Args, Type, rows, warps   what a launch needs; type of the activations; most rows; warps of a block
///   Run                       a warp's way through its tiles: load_first_weights(), load_first_activations(),
///                             step(table, totals), span
///   Totals                    a lane's sums of an N-tile: clear(); for_each(use(output, row, sum)), or where it is
///                             fused pair(): outputs `lane` and `lane` + 32
///   Table                     what stands in shared memory before the tails do: total_bytes, fill(), View
template <class Gemv>
__device__ __forceinline__ void gemv_block(const typename Gemv::Args& args) {
  using Type = typename Gemv::Type;
  constexpr int rows = Gemv::rows;
  constexpr int warps = Gemv::warps;
  constexpr bool fused = Gemv::fused;
  constexpr bool routed = requires { requires Gemv::routed; };
  constexpr bool compact = requires { requires Gemv::compact; };
  static_assert(rows == 1 || !fused);
  extern __shared__ uint4 shared[];
  auto* const table = reinterpret_cast<char*>(shared);
  const PartialSums<rows, warps, compact> partial(table, Gemv::Table::total_bytes);
  bool leaves_late = false;  // the launch behind this one reads its choice at once
  if constexpr (routed) leaves_late = args.choice.logits != nullptr;
  if (!leaves_late) device::trigger_dependent_launch();
  const int warp = warp_index();
  const auto blocks = blocks_of<compact>(args);
  const int block_begin = blocks.begin(blockIdx.x);
  const auto runs = runs_of<compact, warps>(args, blocks.begin(blockIdx.x + 1) - block_begin);
  const int begin = block_begin + runs.begin(warp);

  int sums = 1;  // weights, one after the other, of an output
  bool routes = false;
  if constexpr (routed) sums = args.routes.sums, routes = args.routes.places > 0;
  typename Gemv::Run run(args, begin, block_begin + runs.begin(warp + 1));
  if (!routes) run.load_first_weights();
  if constexpr (rows > 1) begin_inputs<warps>(args);
  Gemv::Table::fill(table, args);
  if (fused && threadIdx.x == 0) prefetch_weights(args);
  const FixUp plan = plan_of<compact>(args, args.k_tiles * sums, blocks);
  if constexpr (compact) prefetch_tail(args, plan);
  if constexpr (routed) {
    if (routes) {
      if (!args.routes.stand) device::wait_grid_dependency();  // which weights they are the launch before says
      find_places<32 * warps>(args);
      run.route.look_up();
      run.load_first_weights();
    }
  }
  const int head = warp;
  const int tail = warps + warp;
  partial.leave(head, -1);
  partial.leave(tail, -1);
  if constexpr (rows > 1) {
    const uint32_t token = finish_inputs<warps>(args);
    run.load_first_activations();
    close_inputs(args, token);
  } else {
    device::wait_grid_dependency();
    run.load_first_activations();
  }
  if (fused && threadIdx.x == 0) prefetch_stream(args);
  [[maybe_unused]] GroupStore<Type, fused> first_store;
  if constexpr (compact) {  // while x is on its way
    const int group = plan.final_group - warp;
    first_store = store_of<Type, fused>(args, plan, partial, group, group >= plan.first_group);
  }
  __syncthreads();
  if constexpr (routed) {
    if (leaves_late) leave_choice<32 * warps>(args);
  }
  const typename Gemv::Table::View values(table);
  typename Gemv::Totals totals;
  totals.clear();
  bool from_start = run.span.column == 0 && begins_output<routed>(run);
  int tail_group = -1;
  const auto leave_sums = [&](int slot, int group) {
    float* const sums = partial.sums_of(slot);
    totals.for_each([&](int output, int row, float sum) { sums[output * rows + row] = sum; });
    partial.leave(slot, group);
  };
  const auto store = [&](int group) {
    if constexpr (fused) {
      GroupStore<Type, fused>(args, group).run(args, totals.pair());
    } else {
      totals.for_each([&](int output, int row, float sum) { store_output<Type>(args, group * 64 + output, row, sum); });
    }
  };
  while (run.span.count > 0) {
    const int group = output_of<routed>(run, sums);
    const bool ends_group = run.span.ends_group(args) && ends_output<routed>(run);
    run.step(values, totals);
    const bool last = run.span.count == 0;
    if (!ends_group && !last) continue;
    // An N-tile is done when it began and ended in this run, else its sums wait for the others'.
    if (!compact && ends_group && from_start) {
      store(group);
    } else if (last) {
      tail_group = group;
      break;
    } else {
      leave_sums(head, group);
    }
    totals.clear();
    from_start = true;
  }
  if constexpr (routed) {
    if (routes) ExpertFetch(args, warp, warps)(args);
  }
  prefetch_next<warps>(args, warp);
  if constexpr (!compact) __syncthreads();  // the table has served: tails take its place
  if (tail_group >= 0) leave_sums(tail, tail_group);
  __syncthreads();
  if (leaves_late) device::trigger_dependent_launch();  // by the others of the block that left the choice
  fix_up<Type, fused, rows, warps, compact>(args, plan, partial, first_store);
  if constexpr (compact) multiply_tail<32 * warps>(args, plan, partial);
}

}  // namespace w4q::kernels::frame
