// gemm_block.cuh over many weights of one size in one launch: each block has a strip of outputs of one weight, all of k, and
// up to 64 of the rows that go through that weight. Nothing is shared between blocks; those of one weight stand next to each
// other, so that it comes from memory once.
#pragma once

#include "kernels/frame/gemm_block.cuh"
#include "kernels/frame/route.h"

namespace w4q::kernels::frame {

/// The launch of a product with weight 0 and all rows; n, k and tiles are those of one weight.
struct GroupedLaunch : Launch {
  const RowGroup* groups;  ///< [count]
  int count, most_rows;    ///< rows of a group, at most 64
};

template <class Weights, int row_groups>
__global__ void __launch_bounds__(GemmTiling<row_groups>::warps * 32, 1) grouped_gemm_kernel(const GroupedLaunch args) {
  using Scalar = typename Weights::Type::Scalar;
  const RowGroup group = args.groups[blockIdx.y];
  Launch mine = args;
  mine.m = group.count;
  Weights::skip(mine, int64_t{group.weight} * args.tiles);
  mine.x = static_cast<const Scalar*>(args.x) + group.first * args.ldx;
  mine.y = static_cast<char*>(args.y) + group.first * args.ldy * (args.fp32 ? sizeof(float) : sizeof(Scalar));
  if (args.bias != nullptr) mine.bias += group.weight * args.n;
  gemm_block<Weights, row_groups>(mine);
}

template <class Weights>
void launch_grouped_gemm(const GroupedLaunch& args, const device::Stream& stream, std::string_view name,
                         std::string_view shape) {
  const auto with_groups = [&]<int row_groups>() {
    using C = GemmTiling<row_groups>;
    constexpr int shared_bytes = Weights::table_bytes + C::work_bytes;
    static_assert(shared_bytes <= least_shared_bytes);
    const dim3 grid(static_cast<unsigned>((args.n_tiles + C::n_tiles - 1) / C::n_tiles),
                    static_cast<unsigned>(args.count));
    launch<grouped_gemm_kernel<Weights, row_groups>>({grid, C::warps * 32, shared_bytes}, stream, "launching a kernel",
                                                     args);
    device::check_launch(name, shape);
  };
  if (args.most_rows <= 32) return with_groups.template operator()<4>();
  with_groups.template operator()<8>();
}

}  // namespace w4q::kernels::frame
