// y = Σ_p W_p · R_p(x ⊘ s) + b on the GPU for passes of rotated schemes (docs/rotated.md), with the agreement of
// packed_linear.h.
//
// f16 activations: one launch for two passes that fit together, with a norm where kbit has the scale of a block, which
// rotates the input itself: at one row every warp what it multiplies, at more all blocks together (share.cuh).
// 1 to 16 rows: a GEMV; from 9 on, on an sm_90, warpgroup products; 17 to 128 rows elsewhere: a GEMM. More rows, or
// bf16: a rotation, and the kbit products pass by pass, over norms that are spread out to scales just before. Many rows
// of two passes that share a rotation: their sum, decoded to 16 bits, and cuBLAS.
//
// Bytes that one pass reads: n·k·bits/8 of codes and 2·n·k/d of norms, 4.125 bits a weight at 4 bits and d = 128.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "device/stream.h"
#include "kernels/linear/packed_linear.h"

namespace w4q::kernels {

/// One pass in GPU memory, as pack.h makes it.
struct RotatedDevicePass {
  int bits = 4;
  int64_t n = 0, k = 0;
  const uint32_t* codes = nullptr;  ///< as in kbit-fragment, aligned to 16 bytes
  const uint16_t* norms = nullptr;  ///< f16, at norm_place (pack.h), aligned to 16 bytes
  int64_t group = 0;                ///< inputs that share a norm: 32 · 2^i, or k
  const float* levels = nullptr;    ///< [2^bits]
  float level_max = 1;              ///< largest magnitude of the levels
  float level_stretch = 1;          ///< of the levels (table_stretch.h)
  float norm_max = 1;               ///< an upper bound of the norms
  float levels_over_first = 0;      ///< its levels are this times those of the first pass; 0: they are not alike
  int64_t block = 1;                ///< of its rotation, at least 2
  const float* factors = nullptr;   ///< [k]: InputRotation::factors(); equal pointers where passes share a rotation
  const uint32_t* signs = nullptr;  ///< rotation_signs (pack.h)
};

struct RotatedLinearArgs {
  int64_t m = 0;
  DType activation = DType::f16;
  const void* x = nullptr;  ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  const float* input_scale = nullptr;  ///< [k], or null
  bool input_rotated = false;          ///< x is R(x ⊘ s) already, and all passes share R
  std::span<const RotatedDevicePass> passes;
  const float* bias = nullptr;  ///< [n], or null
  void* y = nullptr;            ///< [m, n] of the activations' type or f32, rows `ldy` elements apart
  int64_t ldy = 0;
  bool fp32 = false;           ///< y is f32
  bool add = false;            ///< y += instead of y =
  void* semaphores = nullptr;  ///< RotatedWorkspace::semaphores bytes, aligned to 256, zeroed once before the first use
  void* scratch = nullptr;     ///< RotatedWorkspace::scratch bytes, aligned to 256
  size_t semaphore_bytes = 0, scratch_bytes = 0;
  L2Prefetch prefetch;  ///< as LinearArgs has it
  /// One row of f16, and passes that rotated_fuses: otherwise bad_argument (LinearArgs).
  LinearFusion fusion;
  /// The passes were complete before the previous launch in the stream began (LinearArgs).
  bool weights_ready = false;
};

/// Bytes for 1 to `m` rows. Semaphores are zero between launches and may be those of other linears; scratch may be
/// anybody's.
struct RotatedWorkspace {
  size_t semaphores = 0, scratch = 0;
};
RotatedWorkspace rotated_linear_workspace(const device::Properties& gpu, int64_t m, int64_t n, int64_t k);

/// Whether rotated_linear decodes two neighbouring passes of f16 activations into one 16-bit weight at so many rows:
/// both must be there then.
bool decoded_together(const device::Properties& gpu, int64_t rows, const RotatedDevicePass& first,
                      const RotatedDevicePass& second);

/// KernelRow::error_bound of f16 activations: rounding the rotated input to 16 bits adds 2^-11 / √3 · √… in the mean,
/// 1.3e-3 with what the kernels add by themselves; of further passes once more.
constexpr double rotated_error_bound(size_t passes) { return passes > 1 ? 2e-3 : 1.5e-3; }

/// Launches that rotated_linear makes for a decode step's single row: one for each pair of passes that fit together.
int rotated_linear_launches(std::span<const RotatedDevicePass> passes);

/// The kernels that rotated_linear multiplies with, in the order of their launches. Looks at sizes, types, passes and
/// whether the input is rotated or scaled; pointers may be null.
std::vector<std::string_view> rotated_kernels(const device::Properties& gpu, const RotatedLinearArgs& args);

/// Whether rotated_linear takes a LinearFusion with these passes: where one launch takes them all.
bool rotated_fuses(std::span<const RotatedDevicePass> passes);

/// Launches on `stream`. Throws bad_argument for sizes, pointers or a workspace that do not fit, device when a launch
/// fails; as rotate_input and packed_linear do.
void rotated_linear(const RotatedLinearArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
