// x ← R(x ⊘ s) for rows of activations on the GPU: what runs before a linear layer whose input is rotated
// (docs/rotated.md). One warp takes one block of a row; sums are fp32. With fp32 activations the result is that of
// formats::InputRotation bit for bit (class E0); otherwise it is that of the widened values, rounded once.
//
// Bytes: reads and writes m·k activations and reads k factors, for one row 2·2·k + 4·k bytes: at k = 14336 some 115 KB,
// which is nothing beside the weights that the product reads.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace w4q::kernels {

/// The widest block of a rotation that the GPU takes.
inline constexpr int64_t rotate_input_max_block = 1024;

struct RotateInputArgs {
  int64_t m = 0, k = 0;
  int64_t block = 0;              ///< of the rotation: a power of two up to rotate_input_max_block
  DType activation = DType::f16;  ///< of x and y: f32, f16 or bf16
  const void* x = nullptr;        ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  const float* factors = nullptr;      ///< [k]: InputRotation::factors()
  const float* input_scale = nullptr;  ///< [k], or null
  void* y = nullptr;                   ///< [m, k], rows `ldy` elements apart; may be x
  int64_t ldy = 0;
  /// A second rotation of the same x in the same launch: its factors, and where it goes, `ldy` as y. Null: none.
  const float* second_factors = nullptr;
  void* second_y = nullptr;
  bool overlap = false;  ///< begins while the launch before it still runs, where the GPU can
};

/// Launches on `stream`. Throws bad_argument for sizes, types or pointers that do not fit, device when the launch
/// fails.
void rotate_input(const RotateInputArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
