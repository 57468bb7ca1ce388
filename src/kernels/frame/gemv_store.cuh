// How a GEMV of one activation row stores 64 outputs of a decode step (linear_fusion.h): a warp has them, lane l
// outputs l and l + 32. A warp by itself does this while all others are done, so that every instruction counts: kernels
// that fuse stand apart from those that do not. It is one kernel for all that can be fused: several would not fit a
// multiprocessor's instruction cache together (docs/notes/kernels/decode.md).
#pragma once

#include "kernels/common/block_reduce.cuh"
#include "kernels/common/silu.cuh"
#include "kernels/frame/launch.cuh"

namespace w4q::kernels::frame {

/// The scale of the x that a stream of this 1 / rms is followed by: a power of two. A sixteenth leaves room for a
/// stream that grows a thousandfold beyond its largest value at once, and costs 2^-21 of the rms at the lower end of
/// f16.
__device__ __forceinline__ float next_scale(float inverse_rms) {
  return __uint_as_float(__float_as_uint(inverse_rms) & 0x7F800000u) * 0x1p-4f;
}

/// Brings to the L2 cache what storing will need, a share in every block.
__device__ __forceinline__ void prefetch_floats(const void* values, int64_t count) {
  constexpr int line = 32;
#pragma unroll 1
  for (int64_t at = int64_t{blockIdx.x} * line; at < count; at += int64_t{gridDim.x} * line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const float*>(values) + at));
  }
}
/// Before the wait for the launch before: weights; behind it: the residual stream. By one thread.
__device__ __forceinline__ void prefetch_weights(const Launch& args) {
  if (args.fusion.next_x != nullptr) prefetch_floats(args.fusion.next_weight, args.n);
}
__device__ __forceinline__ void prefetch_stream(const Launch& args) {
  if (args.residual != nullptr && args.fp32) prefetch_floats(args.residual, args.n);
}

/// 1 / rms of a product's input, of which its lanes have sums of squares: asked for when it is made, looked at later.
struct InputNorm {
  static constexpr int held = 2;  ///< of a lane, all at once: those of 4096 inputs
  float squares[held] = {}, scale = 1;

  InputNorm() = default;
  __device__ __forceinline__ explicit InputNorm(const Launch& args) {
    const float* const state = args.fusion.input_norm;
    if (state == nullptr) return;
    scale = __ldcg(state);
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int at = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (at < groups(args)) squares[i] = __ldcg(state + 2 + at);
    }
  }
  /// What sums are multiplied with. By a whole warp; that of N-tile 0 leaves the next scale.
  __device__ __forceinline__ float factor(const Launch& args, int group) const {
    float* const state = args.fusion.input_norm;
    if (state == nullptr) return 1;
    float sum = squares[0];
#pragma unroll
    for (int i = 1; i < held; ++i) sum += squares[i];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32 + 32 * held; i < groups(args); i += 32)
      sum += __ldcg(state + 2 + i);
    const float inverse_rms = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(args.k) + args.fusion.eps);
    if (group == 0 && threadIdx.x % 32 == 0) state[1] = next_scale(inverse_rms);
    return inverse_rms / scale;
  }

 private:
  __device__ static int groups(const Launch& args) { return static_cast<int>((args.k + 63) / 64); }
};

/// The bias of an output; launches that take some of many weights have one of their own (routed.cuh).
__device__ __forceinline__ float bias_of(const Launch& args, int row) { return __ldg(args.bias + row); }

/// What an output needs beside its sum: asked for when it is made, and as bits, for whoever converts waits.
struct OutputExtras {
  uint32_t scale_bits = 0, before_bits = 0;
  float bias = 0, weight = 0;

  OutputExtras() = default;
  template <class Args>
  __device__ __forceinline__ OutputExtras(const Args& args, int row) {
    const int at = min(row, static_cast<int>(args.n) - 1);
    if (args.residual != nullptr) {
      before_bits = args.fp32 ? __float_as_uint(static_cast<const float*>(args.residual)[at])
                              : __half_as_ushort(static_cast<const __half*>(args.residual)[at]);
      if (args.fusion.next_x != nullptr) weight = __ldg(args.fusion.next_weight + at);
    }
    if (args.output_scales != nullptr) scale_bits = output_scale_bits(args, at);
    if (args.bias != nullptr) bias = bias_of(args, at);
  }
  __device__ __forceinline__ float value(const Launch& args, float sum) const {
    const float scale = args.output_scales != nullptr ? scale_of(args, scale_bits) : 1.0f;
    return fmaf(sum, scale, bias) + before(args);
  }

 private:
  __device__ __forceinline__ float before(const Launch& args) const {
    if (args.residual == nullptr) return 0;
    return args.fp32 ? __uint_as_float(before_bits)
                     : __half2float(__ushort_as_half(static_cast<unsigned short>(before_bits)));
  }
};

/// Stores an N-tile; what it needs beside the sums it asks for when it is made, before the sums are there.
template <class Type, bool fused>
struct GroupStore {
  using Scalar = typename Type::Scalar;
  int group = 0, row = 0;
  float* kept =
      nullptr;  ///< of what is left of the next x: room for 64 values in shared memory, where a tail is wanted
  OutputExtras extras[2];
  InputNorm norm;
  float next_scale = 1;

  GroupStore() = default;
  /// Not `exists`: asks for nothing, and may not be used.
  template <class Args>
  __device__ __forceinline__ GroupStore(const Args& args, int group_, float* kept_ = nullptr, bool exists = true)
      : GroupStore(args, group_, 64 * group_ + static_cast<int>(threadIdx.x) % 32,
                   64 * group_ + static_cast<int>(threadIdx.x) % 32 + 32, kept_, exists) {}
  /// Where gates and ups do not stand in turn in the weight: rows `low` and `high` of it are the lane's.
  template <class Args>
  __device__ __forceinline__ GroupStore(const Args& args, int group_, int low, int high, float* kept_ = nullptr,
                                        bool exists = true)
      : group(group_), row(low), kept(kept_) {
    if (!exists) return;
    extras[0] = OutputExtras(args, low), extras[1] = OutputExtras(args, high);
    norm = InputNorm(args);
    if (args.fusion.next_x != nullptr) next_scale = __ldcg(args.fusion.last_norm + 1);
  }

  /// What sums are multiplied with; by a whole warp.
  __device__ __forceinline__ float factor(const Launch& args) const {
    return args.result_factor * norm.factor(args, group);
  }
  __device__ __forceinline__ void run(const Launch& args, float2 sums) const { run(args, sums, factor(args)); }
  __device__ __forceinline__ void run(const Launch& args, float2 sums, float factor) const {
    const float low = extras[0].value(args, sums.x * factor), high = extras[1].value(args, sums.y * factor);
    if (args.fusion.swiglu) return store_swiglu(args, low, high);
    store(args, low, 0);
    store(args, high, 32);
    if (args.fusion.next_x == nullptr) return;
    const float squares = warp_sum(leave_next(args, low, 0) + leave_next(args, high, 1));
    if (threadIdx.x % 32 != 0) return;
    args.fusion.next_norm[2 + group] = squares;
    if (group == 0) args.fusion.next_norm[0] = next_scale;
  }

 private:
  /// A lane has two gates or, eight lanes further, their ups: the first makes the low product, the other the high one.
  __device__ __forceinline__ void store_swiglu(const Launch& args, float low, float high) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool has_ups = lane / gate_up_turn % 2 != 0;
    const float other = __shfl_xor_sync(0xFFFFFFFFu, has_ups ? low : high, gate_up_turn);
    const float value = has_ups ? silu_product(other, high) : silu_product(low, other);
    const int at = 32 * group + (has_ups ? 16 : 0) + lane / 16 * gate_up_turn + lane % gate_up_turn;
    static_cast<Scalar*>(args.y)[at] = Type::narrow(value);
  }
  __device__ __forceinline__ void store(const Launch& args, float value, int offset) const {
    if (row + offset >= args.n) return;
    if (args.fp32) {
      static_cast<float*>(args.y)[row + offset] = value;
    } else {
      static_cast<Scalar*>(args.y)[row + offset] = Type::narrow(value);
    }
  }
  /// The next product's input; the square of the value.
  __device__ __forceinline__ float leave_next(const Launch& args, float value, int half) const {
    if (row + 32 * half >= args.n) return 0;
    const float x = extras[half].weight * (value * next_scale);
    const Scalar stored = Type::narrow(fminf(fmaxf(x, -largest_half), largest_half));
    static_cast<Scalar*>(args.fusion.next_x)[row + 32 * half] = stored;
    if (kept != nullptr) kept[static_cast<int>(threadIdx.x) % 32 + 32 * half] = static_cast<float>(stored);
    return value * value;
  }
};

template <class Type>
struct GroupStore<Type, false> {};

}  // namespace w4q::kernels::frame
