#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/element_grid.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/silu.cuh"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/frame/gemv_store.cuh"
#include "kernels/frame/linear_fusion.h"

namespace w4q::kernels {
namespace {

/// `width` neighbouring values: 4 where rows allow 16-byte accesses, else 1.
template <int width>
struct Values {
  float v[width];

  __device__ static Values load(const float* from) {
    Values values;
    if constexpr (width == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      values.v[0] = four.x, values.v[1] = four.y, values.v[2] = four.z, values.v[3] = four.w;
    } else {
      values.v[0] = *from;
    }
    return values;
  }
  __device__ static Values load(const __half* from) {
    Values values;
    if constexpr (width == 4) {
      const uint2 bits = *reinterpret_cast<const uint2*>(from);
      const float2 low = device::HalfType::widen_pair(bits.x), high = device::HalfType::widen_pair(bits.y);
      values.v[0] = low.x, values.v[1] = low.y, values.v[2] = high.x, values.v[3] = high.y;
    } else {
      values.v[0] = __half2float(*from);
    }
    return values;
  }
  __device__ void store(float* to) const {
    if constexpr (width == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *to = v[0];
    }
  }
  __device__ void store(__half* to) const {
    if constexpr (width == 4) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(device::HalfType::pack(v[0], v[1]), device::HalfType::pack(v[2], v[3]));
    } else {
      *to = __float2half_rn(v[0]);
    }
  }
};

/// Chunks of a row that a thread keeps in registers between the two passes; a longer row is read again.
constexpr int held_chunks = 4;

template <int width>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const NormArgs args) {
  using Chunk = Values<width>;
  __shared__ float slots[32];
  device::trigger_dependent_launch();
  const int64_t first = static_cast<int64_t>(threadIdx.x) * width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * width;
  Chunk weights[held_chunks];
#pragma unroll
  for (int i = 0; i < held_chunks; ++i) {
    if (first + i * step < args.cols) weights[i] = Chunk::load(args.weight + first + i * step);
  }
  device::wait_grid_dependency();
  const float* const x = args.x + blockIdx.x * args.cols;
  const PendingSum& pending = args.pending;
  const float gate = pending.gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-__ldcg(pending.gate)));
  float sum = 0;
  const auto add = [&](int64_t at) {
    Chunk chunk = Chunk::load(x + at);
    if (pending.any()) {
      for (int place = 0; place < pending.places; ++place) {
        const Chunk part = Chunk::load(pending.parts + place * args.cols + at);
        const float share = __ldcg(pending.shares + place);
#pragma unroll
        for (int j = 0; j < width; ++j) chunk.v[j] = fmaf(share, part.v[j], chunk.v[j]);
      }
      if (pending.shared != nullptr) {
        const Chunk part = Chunk::load(pending.shared + at);
#pragma unroll
        for (int j = 0; j < width; ++j) chunk.v[j] = fmaf(gate, part.v[j], chunk.v[j]);
      }
      chunk.store(const_cast<float*>(x) + at);
    }
#pragma unroll
    for (int j = 0; j < width; ++j) sum = fmaf(chunk.v[j], chunk.v[j], sum);
    return chunk;
  };
  Chunk held[held_chunks];
#pragma unroll
  for (int i = 0; i < held_chunks; ++i) {
    if (first + i * step < args.cols) held[i] = add(first + i * step);
  }
  for (int64_t at = first + held_chunks * step; at < args.cols; at += step) add(at);
  sum = block_reduce(sum, slots, 0.0f, [](float a, float b) { return a + b; });
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(args.cols) + args.eps);
  if (args.state != nullptr) {
    const int64_t floats = norm_state_floats(args.cols);
    for (int64_t i = threadIdx.x; i < floats; i += blockDim.x) {
      args.state[i] = i == 0 ? scale : i == 1 ? frame::next_scale(scale) : i == 2 ? sum : 0;
    }
  }
  const auto finish = [&](int64_t at, Chunk chunk, const Chunk& weight) {
#pragma unroll
    for (int j = 0; j < width; ++j) chunk.v[j] = weight.v[j] * (chunk.v[j] * scale);
    chunk.store(args.out + blockIdx.x * args.cols + at);
    if (args.out_fp32 != nullptr) chunk.store(args.out_fp32 + blockIdx.x * args.cols + at);
  };
#pragma unroll
  for (int i = 0; i < held_chunks; ++i) {
    if (first + i * step < args.cols) finish(first + i * step, held[i], weights[i]);
  }
  for (int64_t at = first + held_chunks * step; at < args.cols; at += step) {
    finish(at, Chunk::load(x + at), Chunk::load(args.weight + at));
  }
}

__device__ void store(float value, float* to) { *to = value; }
__device__ void store(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void store(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }

template <class T>
__global__ void add_bias_kernel(const float* bias, int64_t rows, int64_t cols, T* y, int64_t stride) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * cols; i += step) {
    T* const at = y + i / cols * stride + i % cols;
    store(static_cast<float>(*at) + bias[i % cols], at);
  }
}

template <int width>
__global__ void silu_multiply_kernel(const __half* gate_up, int64_t rows, int64_t inner, bool turns, __half* out) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t chunks = inner / width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * chunks; i += step) {
    const int64_t row = i / chunks;
    const int64_t column = i % chunks * width;
    const __half* const gate =
        gate_up + row * 2 * inner + (turns ? column / gate_up_turn * gate_up_turn + column : column);
    auto g = Values<width>::load(gate);
    const auto u = Values<width>::load(gate + (turns ? gate_up_turn : inner));
#pragma unroll
    for (int j = 0; j < width; ++j) g.v[j] = silu_product(g.v[j], u.v[j]);
    g.store(out + row * inner + column);
  }
}

template <class T>
__device__ float widen(T value) {
  if constexpr (std::is_same_v<T, float>) return value;
  if constexpr (std::is_same_v<T, __half>) return __half2float(value);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat162float(value);
}

template <class T>
__global__ void embed_kernel(const EmbedArgs args) {
  device::trigger_dependent_launch();
  const T* const from = static_cast<const T*>(args.table) + int64_t{args.ids[blockIdx.y]} * args.cols;
  float* const to = args.x + blockIdx.y * args.cols;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.cols; i += step) {
    to[i] = widen(from[i]) * args.scale;
  }
  const AngleRow& angles = args.angles;
  if (angles.cosines == nullptr || blockIdx.x != 0) return;
  const int64_t row = int64_t{*angles.position} * angles.pairs;
  for (int i = static_cast<int>(threadIdx.x); i < angles.pairs; i += static_cast<int>(blockDim.x)) {
    angles.cosine[i] = angles.cosines[row + i];
    angles.sine[i] = angles.sines[row + i];
  }
}

__global__ void divide_columns_kernel(const __half* x, const float* divisor, int64_t rows, int64_t cols, __half* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * cols; i += step) {
    out[i] = __float2half_rn(__half2float(x[i]) / divisor[i % cols]);
  }
}

using device::element_threads;

unsigned blocks_for(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + element_threads - 1) / element_threads, 1, 4096));
}

template <class T>
void add_bias(const float* bias, int64_t rows, int64_t cols, T* y, int64_t stride, const device::Stream& stream) {
  add_bias_kernel<<<blocks_for(rows * cols), element_threads, 0, stream.get()>>>(bias, rows, cols, y, stride);
  device::check_launch("add_bias", concat(rows, " × ", cols));
}

}  // namespace

void rms_norm_cuda(const NormArgs& args, const device::Stream& stream) {
  ensure(args.rows >= 1 && args.cols >= 1 && args.rows < (int64_t{1} << 31), "rms_norm: no rows");
  ensure(args.state == nullptr || args.rows == 1, "rms_norm: the state of one row");
  const int width = args.cols % 4 == 0 ? 4 : 1;
  const int64_t chunks = args.cols / width;
  // Few rows: as many threads as have work. Many: smaller blocks fill the GPU better.
  const int64_t most = args.rows > 64 ? 256 : 1024;
  const int block = static_cast<int>(std::clamp<int64_t>((chunks + 31) / 32 * 32, 32, most));
  const LaunchShape shape{dim3(static_cast<unsigned>(args.rows)), block, 0, args.overlap};
  if (width == 4) return launch<rms_norm_kernel<4>>(shape, stream, "rms_norm", args);
  launch<rms_norm_kernel<1>>(shape, stream, "rms_norm", args);
}

void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, __half* y, int64_t stride,
                   const device::Stream& stream) {
  add_bias(bias, rows, cols, y, stride, stream);
}
void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, __nv_bfloat16* y, int64_t stride,
                   const device::Stream& stream) {
  add_bias(bias, rows, cols, y, stride, stream);
}
void add_bias_cuda(const float* bias, int64_t rows, int64_t cols, float* y, int64_t stride,
                   const device::Stream& stream) {
  add_bias(bias, rows, cols, y, stride, stream);
}

void silu_multiply_cuda(const __half* gate_up, int64_t rows, int64_t inner, bool turns, __half* out, bool overlap,
                        const device::Stream& stream) {
  const int width = inner % 4 == 0 ? 4 : 1;
  const LaunchShape shape{dim3(blocks_for(rows * inner / width)), element_threads, 0, overlap};
  if (width == 4)
    return launch<silu_multiply_kernel<4>>(shape, stream, "silu_multiply", gate_up, rows, inner, turns, out);
  launch<silu_multiply_kernel<1>>(shape, stream, "silu_multiply", gate_up, rows, inner, turns, out);
}

void embed_cuda(const EmbedArgs& args, const device::Stream& stream) {
  ensure(args.rows >= 1 && args.rows <= 65535, "embed: 1 to 65535 rows at a time");
  const auto across =
      static_cast<unsigned>(std::clamp<int64_t>((args.cols + element_threads - 1) / element_threads, 1, 64));
  const LaunchShape shape{dim3(across, static_cast<unsigned>(args.rows)), element_threads};
  if (args.dtype == DType::f16) return launch<embed_kernel<__half>>(shape, stream, "embed", args);
  if (args.dtype == DType::bf16) return launch<embed_kernel<__nv_bfloat16>>(shape, stream, "embed", args);
  ensure(args.dtype == DType::f32, "embed: a table of another type");
  launch<embed_kernel<float>>(shape, stream, "embed", args);
}

void divide_columns_cuda(const __half* x, const float* divisor, int64_t rows, int64_t cols, __half* out,
                         const device::Stream& stream) {
  divide_columns_kernel<<<blocks_for(rows * cols), element_threads, 0, stream.get()>>>(x, divisor, rows, cols, out);
  device::check_launch("divide_columns", concat(rows, " × ", cols));
}

}  // namespace w4q::kernels
