// A warp has four outputs and walks along k, 256 inputs a step: one 16-byte load of each weight row and lane, one of
// the activations, which the warps of a multiprocessor find in its L1 cache. The first two steps of weights are asked
// for before the launch waits for the one before it.
#include "kernels/linear/dense_gemv_cuda.h"

#include "core/error.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/silu.cuh"

namespace w4q::kernels {
namespace dense_gemv {
namespace {

constexpr int warps = 8;
constexpr int rows = 4;       ///< outputs of a warp
constexpr int in_flight = 2;  ///< steps of weights asked for ahead
constexpr int64_t step_inputs = 256;
/// Fewer outputs than this are shared by warps: there would be too few loads in flight.
constexpr int64_t few_outputs = 8192;
constexpr int few_split = 4;

enum class Output { half, fp32, residual, gated };

__device__ __forceinline__ float dot(const uint4& w, const uint4& x, float sum) {
  const uint32_t a[4] = {w.x, w.y, w.z, w.w};
  const uint32_t b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 left = __half22float2(reinterpret_cast<const __half2&>(a[i]));
    const float2 right = __half22float2(reinterpret_cast<const __half2&>(b[i]));
    sum = fmaf(left.x, right.x, sum);
    sum = fmaf(left.y, right.y, sum);
  }
  return sum;
}

struct Step {
  uint4 weight[rows];

  __device__ void load(const __half* const (&row)[rows], int64_t at, int64_t k) {
    if (at >= k) return;
#pragma unroll
    for (int r = 0; r < rows; ++r) weight[r] = device::load_once(reinterpret_cast<const uint4*>(row[r] + at));
  }
};

/// The row of W behind output `r` of team `team` (the warps that share outputs): gated outputs are two of the first
/// half and two of the second.
template <Output output>
__device__ int64_t row_index(const DenseGemvArgs& args, int64_t team, int r) {
  if constexpr (output == Output::gated) return team * (rows / 2) + r % 2 + (r / 2) * (args.n / 2);
  return team * rows + r;
}

template <Output output>
__device__ void store(const DenseGemvArgs& args, int64_t team, const float (&sums)[rows]) {
  float values[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int64_t row = min(row_index<output>(args, team, r), args.n - 1);
    values[r] = args.bias == nullptr ? sums[r] : sums[r] + args.bias[row];
  }
  if constexpr (output == Output::gated) {
#pragma unroll
    for (int r = 0; r < rows / 2; ++r) {
      const int64_t at = team * (rows / 2) + r;
      if (at >= args.n / 2) return;
      // What lies between is rounded as if it were stored.
      const float gate = __half2float(__float2half_rn(values[r]));
      const float up = __half2float(__float2half_rn(values[r + 2]));
      args.gated[at] = __float2half_rn(silu_product(gate, up));
    }
  } else {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int64_t at = team * rows + r;
      if (at >= args.n) return;
      if constexpr (output == Output::half) args.out[at] = __float2half_rn(values[r]);
      if constexpr (output == Output::fp32) args.out_fp32[at] = values[r];
      if constexpr (output == Output::residual) args.residual[at] += values[r];
    }
  }
}

/// Adds the sums of the warps of a team, in their order, in its first warp.
template <int split>
__device__ void add_team(float (&sums)[rows]) {
  __shared__ float shared[warps][rows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int r = 0; r < rows; ++r) shared[warp][r] = sums[r];
  }
  __syncthreads();
  if (warp % split != 0) return;
#pragma unroll
  for (int other = 1; other < split; ++other) {
#pragma unroll
    for (int r = 0; r < rows; ++r) sums[r] += shared[warp + other][r];
  }
}

template <Output output, int split>
__global__ void __launch_bounds__(warps * 32) dense_gemv_kernel(const DenseGemvArgs args) {
  device::trigger_dependent_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t team = int64_t{blockIdx.x} * (warps / split) + warp / split;
  const __half* row[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) row[r] = args.weight + min(row_index<output>(args, team, r), args.n - 1) * args.k;
  constexpr int64_t stride = split * step_inputs;
  const int64_t first = int64_t{threadIdx.x} % 32 * 8 + warp % split * step_inputs;
  Step ring[in_flight];
#pragma unroll
  for (int i = 0; i < in_flight; ++i) ring[i].load(row, first + i * stride, args.k);
  device::wait_grid_dependency();
  float sums[rows] = {};
  for (int64_t at = first; at < args.k; at += in_flight * stride) {
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int64_t here = at + i * stride;
      if (here < args.k) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(args.x + here));
#pragma unroll
        for (int r = 0; r < rows; ++r) sums[r] = dot(ring[i].weight[r], x, sums[r]);
      }
      ring[i].load(row, here + in_flight * stride, args.k);
    }
  }
#pragma unroll
  for (float& sum : sums) sum = warp_sum(sum);
  if constexpr (split > 1) add_team<split>(sums);
  if (threadIdx.x % 32 == 0 && warp % split == 0) store<output>(args, team, sums);
}

template <Output output, int split>
void launch_split(const DenseGemvArgs& args, const device::Stream& stream) {
  const int64_t teams = output == Output::gated ? (args.n / 2 + 1) / 2 : (args.n + rows - 1) / rows;
  constexpr int64_t teams_in_block = warps / split;
  const int64_t blocks = (teams + teams_in_block - 1) / teams_in_block;
  launch<dense_gemv_kernel<output, split>>({dim3(static_cast<unsigned>(blocks)), warps * 32, 0, args.overlap}, stream,
                                           "dense_gemv", args);
}

template <Output output>
void launch_gemv(const DenseGemvArgs& args, const device::Stream& stream) {
  if (args.n < few_outputs) return launch_split<output, few_split>(args, stream);
  launch_split<output, 1>(args, stream);
}

}  // namespace
}  // namespace dense_gemv

void dense_gemv_cuda(const DenseGemvArgs& args, const device::Stream& stream) {
  using namespace dense_gemv;
  ensure(dense_gemv_accepts(args.n, args.k), "dense_gemv: sizes do not fit");
  if (args.out != nullptr) return launch_gemv<Output::half>(args, stream);
  if (args.out_fp32 != nullptr) return launch_gemv<Output::fp32>(args, stream);
  if (args.residual != nullptr) return launch_gemv<Output::residual>(args, stream);
  ensure(args.gated != nullptr && args.n % 2 == 0, "dense_gemv: no output");
  launch_gemv<Output::gated>(args, stream);
}

}  // namespace w4q::kernels
