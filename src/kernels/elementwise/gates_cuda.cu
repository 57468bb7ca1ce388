#include <algorithm>

#include "device/element_grid.h"
#include "device/fragment.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/elementwise/gated.cuh"
#include "kernels/elementwise/gates_cuda.h"
#include "kernels/frame/linear_fusion.h"

namespace w4q::kernels {
namespace {

using device::element_blocks;
using device::element_threads;

__global__ void gate_kernel(Activation activation, float limit, const float* both, int64_t rows, int64_t inner,
                            GateColumns columns, __half* out) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= inner) return;
  int64_t gate = c, up = inner + c;
  if (columns == GateColumns::in_turn) gate = 2 * c, up = 2 * c + 1;
  if (columns == GateColumns::turns) {
    gate = c / gate_up_turn * (2 * gate_up_turn) + c % gate_up_turn;
    up = gate + gate_up_turn;
  }
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const float* const from = both + row * 2 * inner;
    out[row * inner + c] = narrow(gated(activation, limit, __ldcg(from + gate), __ldcg(from + up)));
  }
}

__global__ void split_kernel(const SplitGatesArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t width = args.heads * args.head_dim, all = 2 * width + args.behind;
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (c >= all) return;
  const float value = __ldcg(args.products + row * all + c);
  if (c >= 2 * width) {
    args.qkv[row * (width + args.behind) + c - width] = value;
    return;
  }
  const int64_t head = c / (2 * args.head_dim), at = c % (2 * args.head_dim);
  if (at < args.head_dim) {
    args.qkv[row * (width + args.behind) + head * args.head_dim + at] = value;
  } else {
    args.gates[row * width + head * args.head_dim + at - args.head_dim] = value;
  }
}

__global__ void sigmoid_kernel(__half* x, const float* gates, int64_t count) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) x[i] = narrow(__half2float(x[i]) * sigmoid(__ldcg(gates + i)));
}

}  // namespace

void gate_multiply_cuda(const Gating& gating, const float* both, int64_t rows, int64_t inner, GateColumns columns,
                        __half* out, bool overlap, const device::Stream& stream) {
  launch<gate_kernel>({.grid = dim3(element_blocks(inner), static_cast<unsigned>(std::min<int64_t>(rows, 65535))),
                       .threads = element_threads,
                       .overlap = overlap},
                      stream, "gate_multiply", gating.activation, static_cast<float>(gating.limit), both, rows, inner,
                      columns, out);
}

void split_gates_cuda(const SplitGatesArgs& args, const device::Stream& stream) {
  const int64_t width = 2 * args.heads * args.head_dim + args.behind;
  launch<split_kernel>({.grid = dim3(element_blocks(width), static_cast<unsigned>(args.rows)),
                        .threads = element_threads,
                        .overlap = args.overlap},
                       stream, "split_gates", args);
}

void sigmoid_multiply_cuda(__half* x, const float* gates, int64_t count, bool overlap, const device::Stream& stream) {
  launch<sigmoid_kernel>({.grid = dim3(element_blocks(count)), .threads = element_threads, .overlap = overlap}, stream,
                         "sigmoid_multiply", x, gates, count);
}

}  // namespace w4q::kernels
