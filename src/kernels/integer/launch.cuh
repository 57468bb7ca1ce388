// What the kernels of integer schemes share on both sides of a launch.
#pragma once

#include "kernels/frame/launch.cuh"
#include "kernels/integer/tile.cuh"
#include "kernels/linear/kernel_row.h"

namespace w4q::kernels {

/// int4 and int8 with 16-bit scales and groups of 32 · 2^i inputs or one.
bool takes_marlin(const formats::Scheme& scheme);
/// What the kernels on Marlin's words need to know of a layer; result_factor is left to the caller.
integer::MarlinLaunch prepare_marlin(const LinearArgs& args);

}  // namespace w4q::kernels

namespace w4q::kernels::integer {

/// 1 to 16 activation rows on Marlin's words (gemv_cuda.cu).
void launch_marlin_gemv(const MarlinLaunch& args, int bits, DType activation, int blocks, const device::Stream& stream,
                        std::string_view shape);

/// 17 to 64 (gemm_cuda.cu).
void launch_marlin_gemm(const MarlinLaunch& args, int bits, DType activation, int blocks, const device::Stream& stream,
                        std::string_view shape);
/// What a launch on block-interleaved words needs on top.
struct InterleavedLaunch : Launch {
  const uint32_t* zeros;  ///< [groups][zero_words]; null: every zero point is 8
  int64_t zero_words;     ///< of eight outputs
  int group_shift;        ///< a group is 2^group_shift blocks of 32 inputs
};
/// 1 to 8 activation rows on block-interleaved words (interleaved_gemv_cuda.cu).
void launch_interleaved_gemv(const InterleavedLaunch& args, DType activation, int blocks, const device::Stream& stream,
                             std::string_view shape);

/// Calls body.operator()<bits, Type, with_zeros>() for a width and a type of activations.
template <class Body>
void with_types(const MarlinLaunch& args, int bits, DType activation, const Body& body) {
  const auto with_zeros = [&]<int width, class Type>() {
    if (args.zeros != nullptr) return body.template operator()<width, Type, true>();
    return body.template operator()<width, Type, false>();
  };
  const auto with_type = [&]<int width>() {
    if (activation == DType::f16) return with_zeros.template operator()<width, device::HalfType>();
    return with_zeros.template operator()<width, device::Bf16Type>();
  };
  if (bits == 4) return with_type.template operator()<4>();
  return with_type.template operator()<8>();
}

/// The same with a LinearFusion.
void launch_fused_marlin_gemv(const MarlinLaunch& args, int bits, int blocks, const device::Stream& stream,
                              std::string_view shape);
void launch_fused_interleaved_gemv(const InterleavedLaunch& args, int blocks, const device::Stream& stream,
                                   std::string_view shape);

}  // namespace w4q::kernels::integer
