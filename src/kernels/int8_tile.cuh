// The pieces of the product with int8 activations that know Marlin's words and the tensor cores' fragments.
#pragma once

#include "kernels/int8_linear.h"

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

/// Four 8 × 16-byte matrices, whose rows are where the 32 lanes say.
__device__ __forceinline__ uint4 load_matrices(const char* at) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at)))
               : "memory");
  return x;
}

/// A lane's words of 64 outputs × 128 inputs in shared memory, and what they say. Pairs of row tiles are taken one
/// after the other.
///
/// 4 bits: a lane's four words of 16 inputs are those of four row tiles. Lanes 8 to 15 and 24 to 31 take the pairs in
/// the other order, so that reading half of each lane's words meets every bank once; an output is a lane's affair.
template <int bits>
struct Codes {
  static constexpr int loads = bits / 4;  ///< 16 bytes of a lane, of 16 inputs
  static constexpr int sixteens = chunk_inputs / 16;
  static constexpr int row_groups = tile_outputs / 64;
  static constexpr int stage_bytes = sixteens * row_groups * loads * 512;
  static constexpr float unit = bits == 4 ? 16 : 1;  ///< a decoded byte is unit · (code − 2^(bits−1))

  /// The row tile that lane `lane` has at place `j` of pair `pair`.
  __device__ static int row_tile(int pair, int j) { return 2 * (pair ^ flip()) + j; }
  __device__ static int flip() { return bits == 4 ? threadIdx.x / 8 % 2 : 0; }

  /// Starts bringing the stage's share of this thread, one of 256.
  struct Fetcher {
    static constexpr int per_sixteen = row_groups * loads * 32;
    static constexpr int turns = sixteens * per_sixteen / 256;
    const uint4* from;  ///< in the first sixteen inputs
    int64_t step;       ///< to the next sixteen
    int to, sixteen, last_sixteen;

    __device__ Fetcher(const GemmLaunch& args, int first_row_group)
        : step(args.input_tile_loads), last_sixteen(args.input_tiles - 1) {
      const int at = static_cast<int>(threadIdx.x) % per_sixteen;
      const int group = at / (32 * loads);
      const int of_group = at % (32 * loads);
      const int row_group = min(first_row_group + group, args.row_groups - 1);
      from = reinterpret_cast<const uint4*>(args.codes) + static_cast<int64_t>(row_group) * (32 * loads) + of_group;
      sixteen = static_cast<int>(threadIdx.x) / per_sixteen;
      to = ((sixteen * row_groups + group) * loads + of_group % loads) * 512 + of_group / loads * 16;
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

  /// The A registers of pair `pair`, [place][32 inputs][register], of row group `group` of the stage.
  __device__ __forceinline__ static void decode(const char* stage, int group, int pair, uint32_t (&a)[2][4][4]) {
    const char* const lanes = stage + group * (loads * 512) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const char* const first = lanes + 2 * step * (row_groups * loads * 512);
      const char* const second = first + row_groups * loads * 512;
      if constexpr (bits == 4) {
        const uint2 w0 = *reinterpret_cast<const uint2*>(first + 8 * (pair ^ flip()));
        const uint2 w1 = *reinterpret_cast<const uint2*>(second + 8 * (pair ^ flip()));
        nibbles(w0.x, w1.x, a[0][step]);
        nibbles(w0.y, w1.y, a[1][step]);
      } else {
        const uint4 w0 = *reinterpret_cast<const uint4*>(first + pair * 512);
        const uint4 w1 = *reinterpret_cast<const uint4*>(second + pair * 512);
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
  __device__ static void nibbles(uint32_t w0, uint32_t w1, uint32_t (&a)[4]) {
    constexpr uint32_t upper = 0xF0F0F0F0u;
    const uint32_t low = even_bytes(w0, w1);
    const uint32_t high = odd_bytes(w0, w1);
    a[0] = (low << 4 & upper) ^ signs;
    a[1] = (high << 4 & upper) ^ signs;
    a[2] = (low & upper) ^ signs;
    a[3] = (high & upper) ^ signs;
  }
  __device__ static void bytes(uint32_t w0, uint32_t w1, uint32_t& first, uint32_t& second) {
    first = even_bytes(w0, w1) ^ signs;
    second = odd_bytes(w0, w1) ^ signs;
  }
};

/// A lane's scales and zero points of 64 outputs and one stage, a segment each.
template <int bits, bool with_zeros, int segments>
struct ChunkGroups {
  uint4 scales[segments];
  uint32_t zeros[segments][with_zeros ? bits / 4 : 1];

  __device__ __forceinline__ void load(const GemmLaunch& args, int row_group, int chunk) {
    const int lane_output = threadIdx.x % 32 / 4;
    const int last_block = static_cast<int>((args.k - 1) / 32);
    const int64_t outputs = int64_t{64} * min(row_group, args.row_groups - 1);
#pragma unroll
    for (int i = 0; i < segments; ++i) {
      const int64_t group = min(4 * chunk + i, last_block) >> args.group_shift;
      if (args.group_shift != integer::one_group) {
        scales[i] =
            __ldg(static_cast<const uint4*>(args.scales) + (group * args.padded_rows + outputs) / 8 + lane_output);
      } else {
        const uint32_t ones = args.bf16_scales ? 0x3F803F80u : 0x3C003C00u;
        scales[i] = make_uint4(ones, ones, ones, ones);
      }
      if constexpr (with_zeros) {
        const auto* const words = static_cast<const uint32_t*>(args.zeros) +
                                  (group * args.padded_rows + outputs) * bits / 32 + lane_output * (bits / 4);
#pragma unroll
        for (int word = 0; word < bits / 4; ++word) {
          zeros[i][word] = args.zeros == nullptr ? 0x80808080u : __ldg(words + word);
        }
      }
    }
  }
  /// Of both halves of place `j` of pair `pair`.
  __device__ __forceinline__ float2 scale(int segment, int pair, int j, bool bf16) const {
    const uint4& s = scales[segment];
    const bool upper = pair != Codes<bits>::flip();
    const uint32_t both = j == 0 ? (upper ? s.z : s.x) : (upper ? s.w : s.y);
    if (bf16) return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
  /// unit · (2^(bits−1) − zero) of half `half` of place `j` of pair `pair`.
  __device__ __forceinline__ int offset(int segment, int pair, int j, int half) const {
    if constexpr (!with_zeros) return 0;
    if constexpr (bits == 4) {
      return 16 * (8 - static_cast<int>(zeros[segment][0] >> (4 * (Codes<bits>::row_tile(pair, j) + 4 * half)) & 15u));
    } else {
      return 128 - static_cast<int>(zeros[segment][pair] >> (8 * (j + 2 * half)) & 255u);
    }
  }
};

}  // namespace w4q::kernels::int8
