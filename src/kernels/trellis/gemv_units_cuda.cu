// GEMV of trellises where a block has much shared memory: one row of f16, everything between products included. Fewer
// instructions and earlier codes than gemv_cuda.cu, for GPUs whose memory is so fast that these bind.
//
//   bytes   n·k·bits/8 of codes, 2·n of scales, once
//   decode  as gemv_run.cuh: the product of a window is a register of A
//   work    four warps work off a contiguous run of units (unit_inputs.cuh), a quarter of k each. Codes come by
//           asynchronous copies of the lanes that decode them, some units ahead. Strips that runs share are summed as in
//           gemv_cuda.cu
//   class   E2
#include <algorithm>

#include "kernels/trellis/gemv_sums.cuh"
#include "kernels/trellis/unit_inputs.cuh"

namespace w4q::kernels::trellis {
namespace {

constexpr int teams = 4, warps = quarters * teams;  ///< a team has a run

/// A place in the order of units: groups, in each its strip or that of gates and that of ups, in each units of a quarter.
template <bool gated>
struct UnitCursor {
  static constexpr int strips = gated ? 2 : 1;
  int group, side = 0, unit;
  const int units, half_strips;

  __device__ UnitCursor(const UnitLaunch& args, int at)
      : group(args.group_of(at)),
        unit(at - group * strips * args.units),
        units(args.units),
        half_strips(args.n_tiles / 2) {
    if (gated && unit >= units) unit -= units, side = 1;
  }
  __device__ bool begins_group() const { return unit == 0 && side == 0; }
  /// The half tile of a quarter, among all of the weight.
  __device__ int64_t half_tile(int quarter) const {
    const int strip = gated ? group + side * half_strips : group;
    return (int64_t{strip} * quarters + quarter) * units + unit;
  }
  __device__ void next_strip() {
    unit = 0;
    if (gated && side == 0) {
      side = 1;
      return;
    }
    side = 0;
    ++group;
  }
};

/// Codes of a warp's units, in the order of its run.
template <int bits, bool gated>
struct CodeRing : UnitRing<bits> {
  using Ring = UnitRing<bits>;
  const uint4* const codes;
  const int quarter;
  UnitCursor<gated> at;
  const uint4* from;
  int stretch, left;  ///< units that are to be fetched of a strip, and behind it

  __device__ CodeRing(const UnitLaunch& args, char* ring, int quarter_, int begin, int end)
      : Ring(ring),
        codes(reinterpret_cast<const uint4*>(args.codes) + threadIdx.x % 32),
        quarter(quarter_),
        at(args, begin),
        from(codes + at.half_tile(quarter) * Ring::unit_quads),
        stretch(min(end - begin, at.units - at.unit)),
        left(end - begin - stretch) {}

  __device__ __forceinline__ void fetch(int place) {
    if (stretch > 0) {
      this->copy(place, from);
      from += Ring::unit_quads;
      if (--stretch == 0) next_stretch();
    }
    device::close_async_group();
  }

 private:
  __device__ __forceinline__ void next_stretch() {
    if (left == 0) return;
    at.next_strip();
    from = codes + at.half_tile(quarter) * Ring::unit_quads;
    stretch = min(left, at.units);
    left -= stretch;
  }
};

/// Sums of bytes of a strip: [row tile][half · 2 + term], a warp's own in lanes 4·g + quarter.
struct ByteSums {
  int values[8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& tile : values) {
#pragma unroll
      for (int& value : tile) value = 0;
    }
  }
  /// With −510 · Σ terms: the 16 rows of the lane's run.
  __device__ __forceinline__ void leave(const int2& terms, float scale, float* to) const {
    constexpr int middle = formats::trellis_largest_level;
#pragma unroll
    for (int row = 0; row < Map::lane_rows; row += 4) {
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int* const of = values[(row + i) / 2] + 2 * (i % 2);
        sums[i] = scale * fmaf(static_cast<float>(of[0] - middle * terms.x), term_factor,
                               static_cast<float>(of[1] - middle * terms.y));
      }
      *reinterpret_cast<float4*>(to + row) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
};

/// Decodes a unit and multiplies it with B at `inputs`; `between` is called on the way.
template <class Codes, class Between>
__device__ __forceinline__ void multiply_unit(const uint32_t (&words)[4 * Codes::bits], uint32_t mask,
                                              const char* inputs, ByteSums& sums, const Between& between) {
  constexpr int bits = Codes::bits;
  const auto* const b = reinterpret_cast<const uint4*>(inputs) + threadIdx.x % 32;
  uint4 of_two_steps;
  unroll<4>([&]<int step>() {
    uint32_t from[bits];
#pragma unroll
    for (int w = 0; w < bits; ++w) from[w] = words[bits * step + w];
    const ColumnPair<Codes> columns(from);
    if constexpr (step % 2 == 0) of_two_steps = b[16 * step];
    const uint32_t even = step % 2 == 0 ? of_two_steps.x : of_two_steps.z;
    const uint32_t odd = step % 2 == 0 ? of_two_steps.y : of_two_steps.w;
    unroll<8>([&]<int r>() {
      const uint32_t a[4] = {columns.template product<2 * r>(0, mask), columns.template product<2 * r + 1>(0, mask),
                             columns.template product<2 * r>(1, mask), columns.template product<2 * r + 1>(1, mask)};
      multiply_bytes(sums.values[r], a, even, odd);
    });
    if constexpr (step == 0) between();
  });
}

/// Shared memory: codes, inputs, and behind them sums; where these will be inputs wait until the largest is known.
template <int bits, bool gated>
struct Memory {
  using Partial = WarpSums<warps, group_outputs<gated>>;
  static constexpr int warp_ring_bytes = CodeRing<bits, gated>::bytes;
  static constexpr int largest_at = warps * warp_ring_bytes, inputs_at = largest_at + 128;

  __host__ __device__ static int sums_at(int pieces) { return inputs_at + pieces * unit_piece_bytes; }
  static int bytes(int pieces) { return sums_at(pieces) + std::max(Partial::bytes, pieces * waiting_piece_bytes); }
};

/// Barrier of a team.
__device__ __forceinline__ void meet(int team) { asm volatile("bar.sync %0, 128;" ::"r"(1 + team) : "memory"); }

template <class Codes, int strips>
__global__ void __launch_bounds__(warps * 32, 1) trellis_unit_gemv_kernel(const UnitLaunch args) {
  constexpr bool gated = strips == 2;
  constexpr int bits = Codes::bits;
  using Memory = trellis::Memory<bits, gated>;
  extern __shared__ __align__(128) char memory[];
  device::trigger_dependent_launch();
  const int warp = frame::warp_index(), lane = static_cast<int>(threadIdx.x) % 32;
  const int quarter = warp % quarters, team = warp / quarters;
  const int units = args.units, group_units = strips * units;
  const frame::Partition& blocks = args.blocks;
  const int block_begin = blocks.begin(blockIdx.x), block_end = blocks.begin(blockIdx.x + 1);
  const frame::Partition runs(block_end - block_begin, teams);
  int at = block_begin + runs.begin(team);
  const int end = block_begin + runs.begin(team + 1);
  CodeRing<bits, gated> ring(args, memory + warp * Memory::warp_ring_bytes, quarter, at, end);
#pragma unroll
  for (int stage = 0; stage < ring.stages - 1; ++stage) ring.fetch(stage * ring.stage_bytes);
  const int first_column = block_begin - args.group_of(block_begin) * group_units;
  const int first_unit = gated && first_column >= units ? first_column - units : first_column;
  const UnitPieces pieces(first_unit, block_end - block_begin, units);
  const UnitStager<warps> stager(args, pieces);
  stager.prefetch();
  const frame::FixUp plan(group_units, blocks);
  if (warp == 0) prefetch_scales<gated>(args, plan);
  if (threadIdx.x == 0) frame::prefetch_weights(args);
  const typename Memory::Partial partial(memory + Memory::sums_at(pieces.count()));
  const StagedUnits staged(memory + Memory::inputs_at, pieces);
  device::wait_grid_dependency();
  if (threadIdx.x == 0) frame::prefetch_stream(args);
  const float scale = stager.run(staged, reinterpret_cast<uint32_t*>(memory + Memory::largest_at),
                                 reinterpret_cast<char*>(partial.sums));
  const int head = warp, tail = warps + warp;
  partial.leave(head, -1);
  partial.leave(tail, -1);

  UnitCursor<gated> here(args, at);
  ByteSums sums;
  bool from_start = here.begins_group(), enters = true, first_group = true;
  const int seam = pieces.begin * piece_units;
  while (at < end) {
    const int group = here.group, slot = first_group ? head : tail;
    if (gated && enters) {  // a run may have one of the strips only
#pragma unroll
      for (int i = 0; i < strips; ++i) {
        *reinterpret_cast<float4*>(partial.of(slot) + 128 * i + 4 * lane) = make_float4(0, 0, 0, 0);
      }
      __syncwarp();
    }
    enters = false;
    const int past = here.unit + min(end - at, units - here.unit);
    const int2 terms = staged.sums_of(pieces, here.unit, past, quarter);
    sums.clear();
    for (int unit = here.unit; unit < past;) {  // inputs stand in one piece, but for one seam
      const char* inputs = staged.units + pieces.place(unit) * unit_bytes;
      const int stop = unit < seam && seam < past ? seam : past;
#pragma unroll 1
      for (; unit < stop; ++unit) {
        device::wait_async<ring.stages - 2>();
        uint32_t words[4 * bits];
        ring.read(words);
        multiply_unit<Codes>(words, args.mask, inputs, sums, [&] { ring.fetch(ring.used); });
        ring.next();
        inputs += unit_bytes;
      }
    }
    if (lane % 4 == quarter) {
      constexpr int rows = static_cast<int>(Map::tile_rows);
      sums.leave(terms, scale, partial.of(slot) + rows * here.side + Map::lane_rows * (lane / 4));
    }
    at += past - here.unit;
    here.unit = past;
    if (past == units) here.next_strip();
    const bool ends_group = here.group != group;
    if (!ends_group && at < end) continue;
    // A group is done when it began and ended in this run, else its sums wait for the others'.
    if (ends_group && from_start) {
      meet(team);
      for (int i = quarter; i < Part<gated>::count; i += quarters) {
        const Part<gated> part(args, group, i);
        if (!part.exists(args)) continue;
        float2 all = make_float2(0, 0);
        for (int w = 0; w < quarters; ++w) {
          const float* const of = partial.of(slot - quarter + w);
          all.x += of[part.low];
          all.y += of[part.high];
        }
        part.store(args).run(args, all);
      }
      meet(team);
    } else {
      partial.leave(slot, group);
      first_group = false;
    }
    enters = true;
    from_start = true;
  }
  frame::prefetch_next<warps>(args, warp);
  __syncthreads();
  fix_up<gated, warps>(args, plan, partial);
}

/// Shared memory of a block.
template <int bits, bool gated>
size_t shared_bytes(int64_t strips, int64_t k, int blocks) {
  const int units = quarter_units(k);
  const int64_t most = (strips * units + blocks - 1) / blocks;
  return static_cast<size_t>(Memory<bits, gated>::bytes(static_cast<int>(UnitPieces::most(most, units))));
}

template <class Codes, bool gated>
void launch_sides(const TrellisLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  const size_t bytes = shared_bytes<Codes::bits, gated>(args.n_tiles, args.k, blocks);
  const LaunchShape in{dim3(static_cast<unsigned>(blocks)), warps * 32, bytes, args.overlap};
  const int units = quarter_units(args.k);
  const UnitLaunch launched(args, blocks, units, (gated ? 2 : 1) * units);
  launch<trellis_unit_gemv_kernel<Codes, gated ? 2 : 1>>(in, stream, "launching a kernel", launched);
  device::check_launch("trellis_unit_gemv", shape);
}

}  // namespace

bool unit_gemv_takes(const device::Properties& gpu, int bits, int64_t n, int64_t k, int blocks) {
  if (k % (quarters * piece_inputs) != 0) return false;
  const int64_t strips = Map(n, k).row_groups, units = quarter_units(k);
  if (strips * units * 2 * units > UINT32_MAX) return false;
  size_t bytes = 0;
  with_bits<2, 3, 4>(bits, [&]<int width>() { bytes = shared_bytes<width, true>(strips, k, blocks); });
  return bytes <= static_cast<size_t>(gpu.shared_bytes_per_block_optin);
}

void launch_unit_gemv(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks,
                      const device::Stream& stream, std::string_view shape) {
  with_codes(scheme, [&]<class Codes>() {
    if (args.fusion.swiglu) return launch_sides<Codes, true>(args, blocks, stream, shape);
    launch_sides<Codes, false>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::trellis
