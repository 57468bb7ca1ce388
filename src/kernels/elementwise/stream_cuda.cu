#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "device/element_grid.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/elementwise/gated.cuh"
#include "kernels/elementwise/stream_cuda.h"

namespace w4q::kernels {
namespace {

using device::element_blocks;
using device::element_threads;

__device__ float add(float a, float b) { return a + b; }

__global__ void add_normed_kernel(const AddNormedArgs args) {
  __shared__ float slots[32];
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const float* const x = args.x + blockIdx.x * args.cols;
  float* const y = args.y + blockIdx.x * args.cols;
  float scale = args.factor;
  if (args.weight != nullptr) {
    float sum = 0;
    for (int64_t c = threadIdx.x; c < args.cols; c += blockDim.x) sum = fmaf(x[c], x[c], sum);
    sum = block_reduce(sum, slots, 0.0f, add);
    scale = 1.0f / sqrtf(sum / static_cast<float>(args.cols) + args.eps);
  }
  const float after = args.stream_scale == nullptr ? 1.0f : *args.stream_scale;
  for (int64_t c = threadIdx.x; c < args.cols; c += blockDim.x) {
    const float value = args.weight == nullptr ? x[c] * scale : args.weight[c] * (x[c] * scale) * args.factor;
    y[c] = (y[c] + value) * after;
  }
}

__global__ void round_kernel(const float* x, int64_t count, __half* out) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = narrow(x[i]);
}

__global__ void cap_kernel(float* logits, int64_t count, float scale, float cap) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = logits[i] * scale;
  logits[i] = cap > 0 ? cap * tanhf(value / cap) : value;
}

__global__ void gate_rows_kernel(Activation activation, float limit, const GateRowsArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (c >= args.cols) return;
  const float gate = args.gate[row * args.gate_stride + c], up = args.up[row * args.up_stride + c];
  args.out[row * args.cols + c] = narrow(gated(activation, limit, gate, up));
}

/// A warp for each layer of a row.
__global__ void embed_layers_kernel(const EmbedLayersArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t layer = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.y;
  if (layer >= args.layers) return;
  const int64_t width = args.layers * args.size, at = layer * args.size;
  const float* const from = args.projected + row * width + at;
  const __half* const own = args.table + int64_t{args.ids[row]} * width + at;
  const float down = 1.0f / sqrtf(static_cast<float>(args.hidden));
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < args.size; i += 32) {
    const float value = from[i] * down;
    sum = fmaf(value, value, sum);
  }
  const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(args.size) + args.eps);
  const float up = sqrtf(static_cast<float>(args.size));
  for (int64_t i = threadIdx.x % 32; i < args.size; i += 32) {
    const float normed = args.norm[i] * (from[i] * down * scale);
    args.out[row * width + at + i] = (normed + __half2float(own[i]) * up) * 0.70710678f;
  }
}

}  // namespace

void add_normed_cuda(const AddNormedArgs& args, const device::Stream& stream) {
  ensure(args.rows >= 1 && args.rows < (int64_t{1} << 31) && args.cols >= 1, "add_normed: no rows");
  const int64_t most = args.rows > 64 ? 256 : 1024;
  const int block = static_cast<int>(std::clamp<int64_t>((args.cols + 127) / 128 * 32, 32, most));
  launch<add_normed_kernel>({dim3(static_cast<unsigned>(args.rows)), block, 0, args.overlap}, stream, "add_normed",
                            args);
}

void round_stream_cuda(const float* x, int64_t count, __half* out, bool overlap, const device::Stream& stream) {
  launch<round_kernel>({dim3(element_blocks(count)), element_threads, 0, overlap}, stream, "round_stream", x, count,
                       out);
}

void cap_logits_cuda(float* logits, int64_t count, float scale, float cap, bool overlap, const device::Stream& stream) {
  launch<cap_kernel>({dim3(element_blocks(count)), element_threads, 0, overlap}, stream, "cap_logits", logits, count,
                     scale, cap);
}

void gate_rows_cuda(const Gating& gating, const GateRowsArgs& args, const device::Stream& stream) {
  const dim3 grid(element_blocks(args.cols), static_cast<unsigned>(args.rows));
  launch<gate_rows_kernel>({grid, element_threads, 0, args.overlap}, stream, "gate_rows", gating.activation,
                           static_cast<float>(gating.limit), args);
}

void embed_layers_cuda(const EmbedLayersArgs& args, const device::Stream& stream) {
  const dim3 grid(static_cast<unsigned>((args.layers + element_threads / 32 - 1) / (element_threads / 32)),
                  static_cast<unsigned>(args.rows));
  launch<embed_layers_kernel>({grid, element_threads, 0, args.overlap}, stream, "embed_layers", args);
}

}  // namespace w4q::kernels
