// kbit linear layer for 1 to 16 activation rows: memory-bound, so everything serves an unbroken stream of weights.
//
// Every warp of the grid works off one contiguous run of tiles, equal to ±1 tile; within a run the warp never waits for
// another. A row group (64 outputs × k) that lies in one run is stored straight from the registers. One that several
// warps share is summed at the end: in shared memory, warp by warp, and across blocks, in their order, by the block
// that holds its last tile. So the result is the same in every run of the program.
//
// Where launches may overlap, the next one fills its table and its ring of tiles on the multiprocessors that are done
// while others still compute.
#include "kernels/kbit_gemv_run.cuh"

namespace w4q::kernels::kbit {
namespace {

template <int bits, class Type, class Scales, int rows, int tiles, int warps>
__global__ void __launch_bounds__(warps * 32, 1) kbit_gemv_kernel(const Launch args) {
  using Values = PairTable<bits, gemv_table_kilobytes>;
  extern __shared__ uint4 shared[];
  auto* const table = reinterpret_cast<char*>(shared);
  const Slots<rows, warps> slots(table, Values::total_bytes);
  device::allow_next_launch();
  const int warp = warp_index();
  const Deal blocks(args.tiles, gridDim.x);
  const int block_begin = blocks.begin(blockIdx.x);
  const Deal runs(blocks.begin(blockIdx.x + 1) - block_begin, warps);
  const int begin = block_begin + runs.begin(warp);

  Run<bits, Type, Scales, rows, tiles> run(args, begin, block_begin + runs.begin(warp + 1));
  run.load_first_weights();
  Values::template fill<Type>(table, args.codebook, args.table_exponent);
  const Outline outline(args, blocks);
  const int head = warp;
  const int tail = warps + warp;
  slots.leave(head, -1);
  slots.leave(tail, -1);
  device::wait_for_previous_launch();
  run.load_first_activations();
  __syncthreads();
  const LanePairs<bits, gemv_table_kilobytes> pairs(table);
  Totals<rows> totals;
  totals.clear();
  bool from_start = run.span.column == 0;
  int tail_group = -1;
  const auto leave_sums = [&](int slot, int group) {
    float* const sums = slots.sums_of(slot);
    totals.for_each([&](int output, int row, float sum) { sums[output * rows + row] = sum; });
    slots.leave(slot, group);
  };
  while (run.span.count > 0) {
    const int group = run.span.group;
    const bool ends_group = run.span.ends_group(args);
    run.step(pairs, totals);
    const bool last = run.span.count == 0;
    if (!ends_group && !last) continue;
    // A row group is done when it began and ended in this run, else its sums wait for the others'.
    if (ends_group && from_start) {
      totals.for_each([&](int output, int row, float sum) { store_output<Type>(args, group * 64 + output, row, sum); });
    } else if (last) {
      tail_group = group;
      break;
    } else {
      leave_sums(head, group);
    }
    totals.clear();
    from_start = true;
  }
  __syncthreads();  // the table has served
  if (tail_group >= 0) leave_sums(tail, tail_group);
  __syncthreads();
  combine<Type, rows, warps>(args, outline, slots);
}

/// The shape of a block, measured: more warps hide more latency, more tiles in flight need more registers.
template <int bits, int rows>
struct Shape {
  static constexpr int warps = rows == 16 ? 8 : 12;
  static constexpr int tiles = rows == 1 && bits < 5 ? 3 : 2;
};

template <int bits, class Type, class Scales, int rows>
void launch_rows(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  constexpr int warps = Shape<bits, rows>::warps;
  constexpr int tiles = Shape<bits, rows>::tiles;
  constexpr int shared_bytes = PairTable<bits, gemv_table_kilobytes>::total_bytes + Slots<rows, warps>::extra_bytes;
  launch_kernel<kbit_gemv_kernel<bits, Type, Scales, rows, tiles, warps>, shared_bytes>(args, blocks, warps * 32,
                                                                                        stream, "kbit_gemv", shape);
}

template <int bits, class Type, class Scales>
void launch_bits(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<bits, Type, Scales, 1>(args, blocks, stream, shape);
  if (args.m <= 4) return launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
  if (args.m <= 8) return launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
  launch_rows<bits, Type, Scales, 16>(args, blocks, stream, shape);
}

}  // namespace

void launch_gemv(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks, cudaStream_t stream,
                 std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    launch_bits<bits, Type, Scales>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
