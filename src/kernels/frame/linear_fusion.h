// What products take over from the small launches between them: RMSNorm, silu, the sum with the residual stream. One
// row of f16, and kernels of the table that say they fuse; silu by itself for any number of rows, by kernels that gate.
//
// RMSNorm is a factor for all of x, so it commutes with the product. Whoever adds to the residual stream leaves
//   x = w · stream · scale   in 16 bits, `scale` a power of two near 1 / rms of the stream as it was before, and
//   sums of squares          of 64 values each,
// and whoever multiplies with x multiplies its sums with 1 / (rms · scale). No launch has to see all of the stream
// before another begins.
#pragma once

#include <cstdint>

#include "kernels/common/divider.h"

namespace w4q::kernels {

/// Floats in GPU memory about the residual stream: [0] the scale of x; [1] that of the x after it, set by whoever knew
/// the rms; [2 + i] the sum of squares of values 64·i to 64·i + 63.
constexpr int64_t norm_state_floats(int64_t cols) { return 2 + (cols + 63) / 64; }

/// Rows of gates and of their ups that take turns: eight lie in lanes of their own, and what mma leaves in a lane of
/// the next eight is theirs.
inline constexpr int gate_up_turn = 8;

/// Of a product that leaves the next one's x: another one with few outputs of the same x, made of what each N-tile has of
/// it. Whoever reads the outputs adds up the parts. A mixture's router needs no launch of its own so.
struct TailProduct {
  const void* weight = nullptr;  ///< [outputs × n] of f16, aligned to 16; null: there is none
  int outputs = 0;               ///< at most most_tail_outputs
  float* parts = nullptr;        ///< [n / 64 × outputs], written: of 64 inputs each
};
inline constexpr int most_tail_outputs = 384;

struct LinearFusion {
  /// SwiGLU epilogue: rows of the weight are gate_up_turn gates and their ups in turn, y[i] = silu(gate) · up, [n/2],
  /// within the range of its type. n a multiple of 64.
  bool swiglu = false;
  /// x has yet to be multiplied with what this state [norm_state_floats(k)] lacks to 1 / rms, and [1] is set; null: x
  /// is complete.
  float* input_norm = nullptr;
  float eps = 0;  ///< added to the mean square

  /// y is the f32 residual stream (LinearArgs::fp32): leaves the next product's x, within the range of its type. Null:
  /// does not.
  void* next_x = nullptr;              ///< [n] of the activations' type
  const float* next_weight = nullptr;  ///< [n], of the norm
  float* next_norm = nullptr;          ///< [norm_state_floats(n)], written
  const float* last_norm = nullptr;    ///< [norm_state_floats(n)] of the stream before: has the scale
  TailProduct tail = {};               ///< of linears that leave_tails()

  /// What takes one row.
  bool has_norm() const { return input_norm != nullptr || next_x != nullptr; }
  bool any() const { return swiglu || has_norm(); }
};

/// Of a launch that takes some of many weights of one size, which stand one below the other (experts of a mixture):
/// outputs of place p are those of weight experts[p]; with `shares` all places have the same outputs, the sums of
/// shares[p] times those of weight experts[p].
struct Routes {
  const int32_t* experts = nullptr;  ///< [places], in GPU memory, written before this launch; null: there are none
  const float* shares = nullptr;     ///< [places], likewise; null: each place has outputs of its own
  int places = 0;                    ///< at most 32
  int groups = 0;                    ///< N-tiles of one weight
  int sums = 1;                      ///< weights whose products add up to an output: one, or those of all places
  int64_t x_stride = 0;              ///< elements from the input of a place to the next one's; 0: they share one
  bool stand = false;                ///< the launch before left experts and shares before it let this one begin
};

/// Codes of some of many weights, which another launch is going to read.
struct ExpertPrefetch {
  static constexpr int line = 128;  ///< bytes
  const char* codes = nullptr;      ///< of weight 0, in GPU memory; null: there are none
  int64_t bytes = 0;                ///< of one weight: whole lines
  Divider by_lines = {};            ///< of one weight
};

}  // namespace w4q::kernels
