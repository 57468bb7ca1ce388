// GEMV of trellises: one row of f16, everything between products included.
//
//   bytes   n·k·bits/8 of codes, 2·n of scales, once
//   lanes   gemv_run.cuh
//   work    every warp of the grid works off one contiguous run of tiles; strips that runs share are summed at the end
//           as frame/gemv_block.cuh says: in a fixed order, across blocks by mailboxes
//   class   E2
#include "kernels/trellis/gemv_run.cuh"
#include "kernels/trellis/gemv_sums.cuh"

namespace w4q::kernels::trellis {
namespace {

constexpr int warps = 16;

/// Stages the inputs of half tiles [begin, end), by all warps.
template <bool gated>
__device__ __forceinline__ void stage_inputs(const TrellisLaunch& args, int begin, int end,
                                             const StagedInputs& staged) {
  const int group = Cursor<gated>::group_halves(args), halves = Cursor<gated>::strips * Cursor<gated>::piece_halves;
  const int column = begin % group, past = column + end - begin;
  const bool all = past > group;
  const int first = all ? 0 : column / halves;
  const int last = ((all ? group : past) + halves - 1) / halves;
  const InputStager stager(args);
  for (int piece = first + frame::warp_index(); piece < last; piece += warps) stager.stage(piece, staged);
}

template <class Codes, int strips>
__global__ void __launch_bounds__(warps * 32, 1) trellis_gemv_kernel(const TrellisLaunch args) {
  constexpr bool gated = strips == 2;
  extern __shared__ uint4 shared[];
  device::trigger_dependent_launch();
  const WarpSums<warps, group_outputs<gated>> partial(reinterpret_cast<char*>(shared));
  const StagedInputs staged{reinterpret_cast<char*>(shared) + partial.bytes};
  const int warp = frame::warp_index(), lane = static_cast<int>(threadIdx.x) % 32;
  const frame::Partition blocks(2 * args.tiles, gridDim.x);
  const int block_begin = blocks.begin(blockIdx.x), block_end = blocks.begin(blockIdx.x + 1);
  const frame::Partition runs(block_end - block_begin, warps);
  Run<Codes, gated> run(args, staged, block_begin + runs.begin(warp), block_begin + runs.begin(warp + 1));
  run.load_first_weights();
  const int head = warp, tail = warps + warp;
  partial.leave(head, -1);
  partial.leave(tail, -1);
  if (threadIdx.x == 0) frame::prefetch_weights(args);
  device::wait_grid_dependency();
  stage_inputs<gated>(args, block_begin, block_end, staged);
  if (threadIdx.x == 0) frame::prefetch_stream(args);
  __syncthreads();
  LaneTotals<gated> totals;
  totals.clear();
  const auto leave_sums = [&](int slot, int group) {
#pragma unroll
    for (int strip = 0; strip < strips; ++strip) {
      *reinterpret_cast<float4*>(partial.of(slot) + 128 * strip + 4 * lane) = totals.whole(strip);
    }
    partial.leave(slot, group);
  };
  const auto store_whole = [&](int group) {  // by way of what is not needed yet
    leave_sums(tail, -1);
    __syncwarp();
    for (int i = 0; i < Part<gated>::count; ++i) {
      const Part<gated> part(args, group, i);
      if (part.exists(args)) part.store(args).run(args, {partial.of(tail)[part.low], partial.of(tail)[part.high]});
    }
    __syncwarp();
  };
  bool from_start = run.at.begins_group();
  while (!run.done()) {
    const int group = run.at.group;
    const bool ends_group = run.step(totals);
    if (!ends_group && !run.done()) continue;
    // A group is done when it began and ended in this run, else its sums wait for the others'.
    if (ends_group && from_start) {
      store_whole(group);
    } else {
      leave_sums(run.done() ? tail : head, group);
    }
    totals.clear();
    from_start = true;
  }
  frame::prefetch_next<warps>(args, warp);
  __syncthreads();
  // Made here, for the main loop has no registers to spare.
  fix_up<gated, warps>(args, frame::FixUp(Cursor<gated>::group_halves(args), blocks), partial);
}

template <class Codes, bool gated>
void launch_sides(const TrellisLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  constexpr int sum_bytes = WarpSums<warps, group_outputs<gated>>::bytes;
  static_assert(sum_bytes + (most_inputs + piece_inputs - 1) / piece_inputs * StagedInputs::piece_bytes <=
                least_shared_bytes);
  const size_t input_bytes = static_cast<size_t>(pieces_of(args.k)) * StagedInputs::piece_bytes;
  const LaunchShape in{dim3(static_cast<unsigned>(blocks)), warps * 32, sum_bytes + input_bytes, args.overlap};
  launch<trellis_gemv_kernel<Codes, Cursor<gated>::strips>>(in, stream, "launching a kernel", args);
  device::check_launch("trellis_gemv", shape);
}

}  // namespace

void launch_gemv(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_codes(scheme, [&]<class Codes>() {
    if (args.fusion.swiglu) return launch_sides<Codes, true>(args, blocks, stream, shape);
    launch_sides<Codes, false>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::trellis
