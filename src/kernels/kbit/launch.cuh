// What the kernels of kbit weights share on both sides of a launch.
#pragma once

#include <string_view>

#include "core/dtype.h"
#include "core/with_bits.h"
#include "formats/scheme.h"
#include "kernels/frame/routed.cuh"
#include "kernels/kbit/tile.cuh"

namespace w4q::kernels {

struct DevicePass;
namespace frame {
struct GroupedLaunch;
}

/// kbit weights that are scaled in registers: powers of two that keep table entries and their products with the scales
/// inside the 16-bit type.
void set_weight_factors(const DevicePass& pass, DType activation, frame::Launch& launch);

}  // namespace w4q::kernels

namespace w4q::kernels::kbit {

using frame::Launch;

/// 1 to 16 activation rows of f16 (gemv_cuda.cu), and of bf16 (gemv_bf16_cuda.cu): half the compilation each.
void launch_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape);
void launch_bf16_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                      std::string_view shape);
/// The first with a LinearFusion (gemv_fused_cuda.cu).
void launch_fused_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                       std::string_view shape);
/// The same of some of many weights (Routes; gemv_routed_cuda.cu).
void launch_routed_gemv(const frame::RoutedLaunch& args, const formats::Scheme& scheme, int blocks,
                        const device::Stream& stream, std::string_view shape);
/// Of the tiles that a warp of a compact kernel asks for at once.
inline constexpr int most_unit_shift = 2;
/// One or the other, of few tiles a warp (KbitGemv::compact; gemv_compact_cuda.cu).
void launch_compact_gemv(const frame::RoutedLaunch& args, const formats::Scheme& scheme, int blocks,
                         const device::Stream& stream, std::string_view shape);
/// 17 to 64 activation rows (gemm_cuda.cu).
void launch_gemm(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks,
                 const device::Stream& stream, std::string_view shape);
/// The same of many weights (gemm_grouped_cuda.cu).
void launch_grouped_gemm(const frame::GroupedLaunch& args, const formats::Scheme& scheme, const device::Stream& stream,
                         std::string_view shape);
/// 1 to 64 activation rows from kbit-tile (reference_cuda.cu).
void launch_reference(const Launch& args, const formats::Scheme& scheme, DType activation, const device::Stream& stream,
                      std::string_view shape);

/// Calls body.operator()<bits, Type>() for a width of kbit codes and a type of activations.
template <class Body>
void with_bits(int bits, DType activation, const Body& body) {
  with_table_bits(bits, [&]<int width>() {
    if (activation == DType::f16) return body.template operator()<width, device::HalfType>();
    body.template operator()<width, device::Bf16Type>();
  });
}

/// Calls body.operator()<bits, Scales>() for a scheme.
template <class Body>
void with_scheme(const formats::Scheme& scheme, const Body& body) {
  with_table_bits(scheme.bits, [&]<int bits>() {
    if (scheme.scale == formats::ScaleType::e4m4) return body.template operator()<bits, E4m4Scales>();
    body.template operator()<bits, F16Scales>();
  });
}

/// Calls body.operator()<bits, Type, Scales>() for a scheme and a type of activations.
template <class Body>
void with_types(const formats::Scheme& scheme, DType activation, const Body& body) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    if (activation == DType::f16) return body.template operator()<bits, device::HalfType, Scales>();
    body.template operator()<bits, device::Bf16Type, Scales>();
  });
}

}  // namespace w4q::kernels::kbit
