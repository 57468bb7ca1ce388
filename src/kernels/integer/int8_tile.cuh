// The pieces of the product with int8 activations that know Marlin's words and the tensor cores' fragments.
#pragma once

#include "device/matrices.cuh"
#include "kernels/integer/int8_linear.h"

namespace w4q::kernels::int8 {

/// 1.5 · 2^23: an integer below 2^22 added to its bits is added to its value. Sums that begin with it are read as
/// floats without a conversion: at most 128 inputs · 255 · 127, or · 16 · 15 · 127, which is just below 2^22.
constexpr uint32_t float_base = 0x4B400000u;

/// c[16 outputs × 8 rows] = a[16 × 32] · b[32 × 8] + d.
__device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&d)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
      "%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3]));
}

/// Codes of a stage in shared memory, and what they say. A warp has half of each lane's words of an N-tile: two of
/// its four row tiles.
///
/// 4 bits: a lane's four words of 16 inputs are those of four row tiles. Lanes 8 to 15 and 24 to 31 take the other
/// half, so that reading half of each lane's words meets every bank once; which output a sum is of is a lane's affair.
template <int bits>
struct Codes {
  static constexpr int loads = bits / 4;  ///< 16 bytes of a lane, of 16 inputs
  static constexpr int sixteens = chunk_inputs / 16;
  static constexpr int n_tiles = tile_outputs / 64;
  static constexpr int stage_bytes = sixteens * n_tiles * loads * 512;
  static constexpr float unit = bits == 4 ? 16 : 1;  ///< a decoded byte is unit · (code − 2^(bits−1))

  /// The pair of row tiles that this lane has in warp half `half`.
  __device__ static int pair(int half) { return bits == 4 ? half ^ static_cast<int>(threadIdx.x) / 8 % 2 : half; }

  /// Starts bringing the stage's share of this thread, one of 256.
  struct Fetcher {
    static constexpr int per_sixteen = n_tiles * loads * 32;
    static constexpr int turns = sixteens * per_sixteen / 256;
    const uint4* from;  ///< in the first sixteen inputs
    int64_t step;       ///< to the next sixteen
    int to, sixteen, last_sixteen;

    __device__ Fetcher(const GemmLaunch& args, int first_row_group)
        : step(args.input_tile_loads), last_sixteen(args.input_tiles - 1) {
      const int at = static_cast<int>(threadIdx.x) % per_sixteen;
      const int group = at / (32 * loads);
      const int of_group = at % (32 * loads);
      const int n_tile = min(first_row_group + group, args.n_tiles - 1);
      from = reinterpret_cast<const uint4*>(args.codes) + static_cast<int64_t>(n_tile) * (32 * loads) + of_group;
      sixteen = static_cast<int>(threadIdx.x) / per_sixteen;
      to = ((sixteen * n_tiles + group) * loads + of_group % loads) * 512 + of_group / loads * 16;
    }
    __device__ __forceinline__ void fetch(char* stage, int chunk) const {
#pragma unroll
      for (int i = 0; i < turns; ++i) {
        const int of_chunk = sixteen + i * (256 / per_sixteen);
        const int64_t at = min(chunk * sixteens + of_chunk, last_sixteen);
        device::copy_async(stage + to + i * (256 * 16), from + at * step);
      }
    }
  };

  /// The A registers of warp half `half`, [place][32 inputs][register], of N-tile `group` of the stage.
  __device__ __forceinline__ static void decode(const char* stage, int group, int half, uint32_t (&a)[2][4][4]) {
    const char* const lanes = stage + group * (loads * 512) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const char* const first = lanes + 2 * step * (n_tiles * loads * 512);
      const char* const second = first + n_tiles * loads * 512;
      if constexpr (bits == 4) {
        const uint2 w0 = *reinterpret_cast<const uint2*>(first + 8 * pair(half));
        const uint2 w1 = *reinterpret_cast<const uint2*>(second + 8 * pair(half));
        nibbles(w0.x, w1.x, a[0][step]);
        nibbles(w0.y, w1.y, a[1][step]);
      } else {
        const uint4 w0 = *reinterpret_cast<const uint4*>(first + half * 512);
        const uint4 w1 = *reinterpret_cast<const uint4*>(second + half * 512);
        bytes(w0.x, w1.x, a[0][step][0], a[0][step][2]);
        bytes(w0.y, w1.y, a[0][step][1], a[0][step][3]);
        bytes(w0.z, w1.z, a[1][step][0], a[1][step][2]);
        bytes(w0.w, w1.w, a[1][step][1], a[1][step][3]);
      }
    }
  }

 private:
  static constexpr uint32_t signs = 0x80808080u;

  /// The bytes that two words have of each half of the row tile, in turn.
  __device__ static uint32_t even_bytes(uint32_t w0, uint32_t w1) { return __byte_perm(w0, w1, 0x6240); }
  __device__ static uint32_t odd_bytes(uint32_t w0, uint32_t w1) { return __byte_perm(w0, w1, 0x7351); }

  /// A code less 8, sixteenfold, is the code in a byte's upper half with the sign turned.
  __device__ static uint32_t centered(uint32_t word) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(word), "r"(0xF0F0F0F0u), "r"(signs));  // (a & b) ^ c
    return result;
  }
  __device__ static void nibbles(uint32_t w0, uint32_t w1, uint32_t (&a)[4]) {
    const uint32_t low = even_bytes(w0, w1);
    const uint32_t high = odd_bytes(w0, w1);
    a[0] = centered(low << 4);
    a[1] = centered(high << 4);
    a[2] = centered(low);
    a[3] = centered(high);
  }
  __device__ static void bytes(uint32_t w0, uint32_t w1, uint32_t& first, uint32_t& second) {
    first = even_bytes(w0, w1) ^ signs;
    second = odd_bytes(w0, w1) ^ signs;
  }
};

/// A lane's scales and zero points of one stage: two row tiles, a segment each.
template <int bits, bool with_zeros, int segments>
struct ChunkGroups {
  uint2 scales[segments];
  uint32_t zeros[segments];  ///< 4 bits: of four row tiles, 8 bits: of two

  __device__ __forceinline__ void load(const GemmLaunch& args, int n_tile, int half, int chunk) {
    const int lane_output = threadIdx.x % 32 / 4;
    const int last_block = static_cast<int>((args.k - 1) / 32);
    const int64_t outputs = int64_t{64} * min(n_tile, args.n_tiles - 1);
#pragma unroll
    for (int i = 0; i < segments; ++i) {
      const int64_t first = (min(4 * chunk + i, last_block) >> args.group_shift) * args.padded_rows + outputs;
      if (args.group_shift != integer::one_group) {
        scales[i] =
            __ldg(static_cast<const uint2*>(args.scales) + first / 4 + 2 * lane_output + Codes<bits>::pair(half));
      } else {
        const uint32_t ones = args.bf16_scales ? 0x3F803F80u : 0x3C003C00u;
        scales[i] = make_uint2(ones, ones);
      }
      if constexpr (with_zeros) {
        const auto* const words = static_cast<const uint32_t*>(args.zeros) + first * bits / 32;
        zeros[i] =
            args.zeros == nullptr ? 0x80808080u : __ldg(words + (bits == 4 ? lane_output : 2 * lane_output + half));
      }
    }
  }
  /// Of both halves of row tile `j`.
  __device__ __forceinline__ float2 scale(int segment, int j, bool bf16) const {
    const uint32_t both = j == 0 ? scales[segment].x : scales[segment].y;
    if (bf16) return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
  /// unit · (2^(bits−1) − zero) of both halves of row tile `j`.
  __device__ __forceinline__ int2 offset(int segment, int half, int j) const {
    if constexpr (!with_zeros) return make_int2(0, 0);
    const int tile = bits == 4 ? 2 * Codes<bits>::pair(half) + j : j;
    const auto code = [&](int upper) {
      constexpr uint32_t mask = (1u << bits) - 1;
      return static_cast<int>(zeros[segment] >> (bits * (tile + (bits == 4 ? 4 : 2) * upper)) & mask);
    };
    constexpr int unit = static_cast<int>(Codes<bits>::unit), middle = 1 << (bits - 1);
    return make_int2(unit * (middle - code(0)), unit * (middle - code(1)));
  }
};

}  // namespace w4q::kernels::int8
