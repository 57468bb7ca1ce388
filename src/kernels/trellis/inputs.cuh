// One row of activations as the GEMV of trellises multiplies it: two terms of int8 for each, in shared memory.
//
//   x = scale · (254 · first + second)      scale = largest of 64 / (127 · 254): 16 bits beside the largest of a tile
//
// A warp stages a piece of 256 inputs, eight neighbours a lane, which it divides by the input's scale and rotates on the
// way where the launch says so (kernels/rotated/input.cuh).
#pragma once

#include "kernels/rotated/input.cuh"
#include "kernels/trellis/launch.cuh"

namespace w4q::kernels::trellis {

constexpr int term_factor = 254, largest_term = 127;

/// The nearest whole number, of an input that is at most 2^22, without the conversions that a multiprocessor has few
/// units for: on top of 1.5 · 2^23 it is what the sum is rounded to.
struct Rounded {
  static constexpr float base = 12582912.0f;
  float on_base;
  __device__ __forceinline__ explicit Rounded(float value) { on_base = __fadd_rn(value, base); }
  __device__ __forceinline__ float value() const { return __fsub_rn(on_base, base); }
  __device__ __forceinline__ int whole() const { return __float_as_int(on_base) - __float_as_int(base); }
  /// Its lowest byte, four times.
  __device__ __forceinline__ uint32_t bytes() const { return permute(__float_as_uint(on_base), 0, 0); }
};

/// Of an input that is at most largest_term.
struct Terms {
  Rounded first, second;
  __device__ __forceinline__ explicit Terms(float scaled)
      : first(scaled), second((scaled - first.value()) * term_factor) {}
};

/// What terms of inputs up to `largest` are multiplied with; NaN where that is not finite, for terms are anything then.
__device__ __forceinline__ float term_scale(float largest) {
  return largest * (1.0f / (largest_term * term_factor)) + (largest - largest);
}

/// Of a tile: the scale of its terms, and what brings sums of their products with bytes to those with levels, of either
/// half of the lanes' inputs.
struct TileInputs {
  float scale;
  int middle[2];
};

/// Shared memory of a block: [piece] of 256 first and 256 second terms, and of four tiles.
struct StagedInputs {
  static constexpr int piece_bytes = 2 * piece_inputs + piece_tiles * static_cast<int>(sizeof(TileInputs));
  char* pieces;

  /// The lane's 16 inputs of a piece: lane 4·g + t has, of tile g div 2, the terms g mod 2 of inputs 16·t … 16·t + 15.
  __device__ __forceinline__ uint4 terms(int piece) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    return *reinterpret_cast<const uint4*>(pieces + piece * piece_bytes + piece_inputs * (g % 2) + 64 * (g / 2) +
                                           16 * t);
  }
  __device__ __forceinline__ TileInputs tile(int piece, int slot) const {
    return reinterpret_cast<const TileInputs*>(pieces + piece * piece_bytes + 2 * piece_inputs)[slot];
  }
};

__device__ __forceinline__ float largest_of(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

struct InputStager {
  const TrellisLaunch& args;
  const rotated::FragmentRotation rotation;

  __device__ explicit InputStager(const TrellisLaunch& launch) : args(launch), rotation(launch.block) {}

  __device__ __forceinline__ void stage(int piece, const StagedInputs& staged) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float x[8];
    widen(rotated(piece_inputs * piece + 8 * lane), x);
    float largest = 0;
#pragma unroll
    for (const float value : x) largest = largest_of(largest, fabsf(value));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {  // over the lanes of a tile
      largest = largest_of(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
    }
    const float to_terms = largest > 0 ? largest_term / largest : 0.0f;
    uint32_t first[2] = {}, second[2] = {};
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const Terms terms(x[j] * to_terms);
      const int whole[2] = {terms.first.whole(), terms.second.whole()};
      first[j / 4] |= (static_cast<uint32_t>(whole[0]) & 0xFF) << 8 * (j % 4);
      second[j / 4] |= (static_cast<uint32_t>(whole[1]) & 0xFF) << 8 * (j % 4);
      sum += term_factor * whole[0] + whole[1];
    }
    // Lanes t of a tile have 16 inputs each, as the words of a lane of two halves: even and odd lanes here.
#pragma unroll
    for (int step = 2; step < 8; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    const int odd_sum = __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    char* const to = staged.pieces + piece * StagedInputs::piece_bytes;
    *reinterpret_cast<uint2*>(to + 8 * lane) = make_uint2(first[0], first[1]);
    *reinterpret_cast<uint2*>(to + piece_inputs + 8 * lane) = make_uint2(second[0], second[1]);
    if (lane % 8 != 0) return;
    constexpr int middle = -formats::trellis_largest_level;
    const float scale = term_scale(largest);
    reinterpret_cast<TileInputs*>(to + 2 * piece_inputs)[lane / 8] = {scale, {middle * sum, middle * odd_sum}};
  }

  /// Brings the signs of that rotation to the L2 cache; waits for nothing.
  __device__ __forceinline__ void prefetch_signs(int column) const {
    if (args.signs == nullptr || column >= args.k) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(args.signs + column / 32));
  }
  /// Eight inputs from `column` on, of f16, divided and rotated; zeros beyond k. By a warp, whose lanes have neighbours.
  __device__ __forceinline__ uint4 rotated(int column) const {
    const int left = static_cast<int>(args.k) - column;
    const __half* const from = static_cast<const __half*>(args.x) + column;
    rotated::RawInputs raw{};
    raw.x = args.aligned && left >= 8 ? __ldg(reinterpret_cast<const uint4*>(from)) : frame::load_ragged(from, left);
    if (args.input_scale != nullptr) raw.x = divided(raw.x, column, left);
    if (args.signs != nullptr) {
      if (left > 0) raw.signs = __ldg(args.signs + column / 32);
      raw.x = rotation.rotate(raw);
    }
    return raw.x;
  }
  __device__ __forceinline__ static void widen(const uint4& halves, float (&x)[8]) {
    const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = device::HalfType::widen_pair(words[j]);
      x[2 * j] = pair.x;
      x[2 * j + 1] = pair.y;
    }
  }

 private:
  /// By the input's scale, rounded to f16 as a launch of its own would.
  __device__ __forceinline__ uint4 divided(const uint4& x, int column, int left) const {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t result[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = device::HalfType::widen_pair(words[j]);
      const float low = 2 * j < left ? __ldg(args.input_scale + column + 2 * j) : 1;
      const float high = 2 * j + 1 < left ? __ldg(args.input_scale + column + 2 * j + 1) : 1;
      result[j] = device::HalfType::pack(pair.x / low, pair.y / high);
    }
    return make_uint4(result[0], result[1], result[2], result[3]);
  }
};

}  // namespace w4q::kernels::trellis
