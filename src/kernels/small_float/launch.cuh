// What the kernels of small floats share on both sides of a launch. Activations are f16.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"
#include "formats/scheme.h"
#include "kernels/frame/launch.cuh"
#include "kernels/small_float/codes.cuh"
#include "kernels/small_float/scales.cuh"

namespace w4q::kernels {

struct DevicePass;
struct LinearDesc;

}  // namespace w4q::kernels

namespace w4q::kernels::small_float {

using frame::Launch;

/// Whether kernels of `least` to `most` rows serve a layer: float-fragment, activations of f16.
bool accepts(const LinearDesc& desc, int64_t least, int64_t most, std::string* why);
/// E4M3 scales read a 256th of their value, for which E2M1's table has 256 times its.
void set_factors(const DevicePass& pass, bool rounds_scales, Launch& launch);

/// Whether its scales are those of tiles and outputs: FP8.
inline bool has_tiles(const formats::Scheme& scheme) noexcept { return scheme.bits == 8 && scheme.block != 32; }

/// 2 to 16 activation rows (gemv_cuda.cu); one, with a LinearFusion or without (gemv_fused_cuda.cu); 17 to 64
/// (gemm_cuda.cu).
void launch_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape);
void launch_fused_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                       std::string_view shape);
void launch_gemm(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape);

/// Calls body.operator()<bits, Scales>() for a scheme.
template <class Body>
void with_scheme(const formats::Scheme& scheme, const Body& body) {
  if (scheme.bits == 4 && scheme.scale == formats::ScaleType::e4m3) return body.template operator()<4, E4m3Scales>();
  if (scheme.bits == 4) return body.template operator()<4, E8m0Scales>();
  if (!has_tiles(scheme)) return body.template operator()<8, E8m0Scales>();
  body.template operator()<8, TileScales>();
}

}  // namespace w4q::kernels::small_float
