// What the kernels of trellises share on both sides of a launch.
#pragma once

#include <string_view>

#include "core/with_bits.h"
#include "device/properties.h"
#include "formats/scheme.h"
#include "kernels/frame/launch.cuh"
#include "kernels/rotated/share.cuh"
#include "kernels/trellis/windows.cuh"

namespace w4q::kernels::trellis {

/// Tiles are those of the layout: 128 outputs × 64 inputs; `n_tiles` are strips.
struct TrellisLaunch : frame::Launch {
  uint32_t mask;                 ///< the bits of a window
  const float* input_scale;      ///< [k] that divides x, or null
  const uint32_t* signs;         ///< of the rotation of x (rotation_signs); null: x is rotated already
  int block;                     ///< of the rotation: 32, 64 or 128
  rotated::SharedInputs inputs;  ///< several rows: what the blocks make `x` of together, or nothing
};

constexpr int piece_tiles = 4, piece_inputs = 256;  ///< what a warp stages at once
inline int pieces_of(int64_t k) { return static_cast<int>((k + piece_inputs - 1) / piece_inputs); }
/// Most inputs that a block of the GEMV has room for.
constexpr int64_t most_inputs = 28672;

/// One row of f16 (gemv_cuda.cu), with what lies between products; SwiGLU of gates above ups, whole strips of either.
void launch_gemv(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape);
/// The same where a block has room for it (gemv_units_cuda.cu).
bool unit_gemv_takes(const device::Properties& gpu, int bits, int64_t n, int64_t k, int blocks);
void launch_unit_gemv(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks,
                      const device::Stream& stream, std::string_view shape);
/// 2 to 16 rows of f16 (rows_cuda.cu), rotated in the launch where `inputs` says so.
void launch_rows(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape);
/// The same where a block has room for it (rows_units_cuda.cu), rotated where there are `signs`.
bool unit_rows_take(const device::Properties& gpu, int bits, int64_t n, int64_t k, int64_t m, int blocks);
void launch_unit_rows(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks,
                      const device::Stream& stream, std::string_view shape);

/// Calls body.operator()<Codes>() for a scheme.
template <class Body>
void with_codes(const formats::Scheme& scheme, const Body& body) {
  with_bits<2, 3, 4>(scheme.bits, [&]<int bits>() {
    if (scheme.window == 16) return body.template operator()<Codes<bits, 16>>();
    if (scheme.window == 14) return body.template operator()<Codes<bits, 14>>();
    body.template operator()<Codes<bits, 0>>();
  });
}

}  // namespace w4q::kernels::trellis
