#include "kernels/frame/gemm_block.cuh"

namespace w4q::kernels::frame {

int gemm_blocks(const Launch& args, int most) {
  const auto blocks = [&](int splits, int n_tiles) {
    const int per_strip = (args.k_tiles + splits - 1) / splits;
    const int strips = (args.n_tiles + n_tiles - 1) / n_tiles;
    const int per_block = (per_strip * strips + most - 1) / most;
    // The same number of blocks for every strip spares each block the second strip, where it costs no time.
    const int sharers = std::max(1, most / strips);
    const bool even = strips <= most && (per_strip + sharers - 1) / sharers <= per_block;
    return even ? strips * sharers : std::min(most, per_strip * strips);
  };
  if (args.m <= 32) return blocks(GemmTiling<4>::splits, GemmTiling<4>::n_tiles);
  return blocks(GemmTiling<8>::splits, GemmTiling<8>::n_tiles);
}

int gemm_mailbox_words(int64_t m) { return m <= 32 ? GemmTiling<4>::block_sums : GemmTiling<8>::block_sums; }

}  // namespace w4q::kernels::frame
