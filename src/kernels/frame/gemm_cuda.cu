#include "kernels/frame/gemm_block.cuh"

namespace w4q::kernels::frame {

int gemm_blocks(const Launch& args, int most) {
  const auto blocks = [&](int splits, int row_groups) {
    const int per_strip = (args.col_groups + splits - 1) / splits;
    const int strips = (args.row_groups + row_groups - 1) / row_groups;
    const int per_block = (per_strip * strips + most - 1) / most;
    // The same number of blocks for every strip spares each block the second strip, where it costs no time.
    const int sharers = std::max(1, most / strips);
    const bool even = strips <= most && (per_strip + sharers - 1) / sharers <= per_block;
    return even ? strips * sharers : std::min(most, per_strip * strips);
  };
  if (args.m <= 32) return blocks(Cut<4>::splits, Cut<4>::row_groups);
  return blocks(Cut<8>::splits, Cut<8>::row_groups);
}

int gemm_packets(int64_t m) { return m <= 32 ? Cut<4>::block_sums : Cut<8>::block_sums; }

}  // namespace w4q::kernels::frame
