// What the passes of a rotated linear are to the launches that multiply them: which of them go together, by which
// kernels, and with which factors.
#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <span>
#include <string_view>

#include "kernels/common/table_stretch.h"
#include "kernels/linear/rows.h"
#include "kernels/rotated/launch.cuh"
#include "kernels/rotated/linear.h"

namespace w4q::kernels::rotated {

inline int64_t groups_of(const RotatedDevicePass& pass) { return (pass.k + pass.group - 1) / pass.group; }

/// From so many rows on two passes that share a rotation are decoded into one weight for cuBLAS (dequantize_sum.h),
/// later where warpgroup products are to be had.
constexpr int64_t least_panel_rows = 128, least_panel_rows_beside_warpgroups = 257;
/// From so many rows on warpgroup products are faster than the GEMV.
constexpr int64_t least_warpgroup_rows = 9;

/// A factor that brings levels to where f16 holds the small ones too, and near numbers of f16.
inline float table_factor(const RotatedDevicePass& pass) {
  return kernels::table_factor(pass.level_max, pass.level_stretch, 10);
}

inline float factor_over_first(const RotatedDevicePass& first, const RotatedDevicePass& pass) {
  if (pass.levels == first.levels) return 1;
  if (pass.bits == first.bits) return pass.levels_over_first / first.levels_over_first;
  return table_factor(first) / table_factor(pass);
}

/// How passes are multiplied: by kernels for rotated weights, or as kbit weights.
enum class Variant { gemv, gemm, warpgroup, dequantize_gemm, kbit };

/// kbit's kernel of so many rows.
inline std::string_view kbit_kernel(const device::Properties& gpu, int bits, int64_t m, int64_t n, int64_t k,
                                    DType activation) {
  return pick_kernel({gpu,
                      {formats::SchemeFamily::kbit, bits, 32, formats::ScaleType::f16},
                      "kbit-fragment",
                      m,
                      n,
                      k,
                      activation})
      .name;
}

/// The way of more rows than the GEMV takes, as kbit goes.
inline Variant variant_of_many(const device::Properties& gpu, int64_t m, int64_t n, int64_t k) {
  const std::string_view name = kbit_kernel(gpu, 4, std::max(m, most_gemv_rows + 1), n, k, DType::f16);
  return name == "kbit-wgmma" ? Variant::warpgroup : name == "kbit-gemm" ? Variant::gemm : Variant::kbit;
}

/// Whether two passes can share a launch of the GEMV.
inline bool fit_together(const RotatedDevicePass& a, const RotatedDevicePass& b) {
  if (a.block != b.block || !rotated::widths_fit(a.bits, b.bits)) return false;
  return a.bits != b.bits || (a.levels_over_first > 0 && b.levels_over_first > 0) || b.levels == a.levels;
}

/// The same of the kernels of more rows, which multiply norms of f16 with a factor of f16.
inline bool rows_fit_together(const RotatedDevicePass& a, const RotatedDevicePass& b) {
  if (a.bits != b.bits || !fit_together(a, b) || (a.group == 32) != (b.group == 32)) return false;
  const float factor = factor_over_first(a, b);
  return factor > 0x1p-6f && factor < 0x1p6f && b.norm_max * factor < 0x1p15f;
}

inline bool rotate_alike(std::span<const RotatedDevicePass> passes) {
  return passes.front().factors == passes.back().factors;
}

/// Whether a launch can rotate its input itself.
inline bool rotates_inside(const RotatedLinearArgs& args, const RotatedDevicePass& pass) {
  return !args.input_rotated && args.input_scale == nullptr && pass.block >= 32 && pass.block <= 128 &&
         pass.k % pass.block == 0;
}

/// How one pass, or two in one launch, are multiplied; nothing where two do not fit together.
inline std::optional<Variant> variant_of(const device::Properties& gpu, const RotatedLinearArgs& args,
                                         std::span<const RotatedDevicePass> passes) {
  const RotatedDevicePass &a = passes.front(), &b = passes.back();
  const bool two = passes.size() > 1;
  if (args.activation != DType::f16) return two ? std::nullopt : std::optional(Variant::kbit);
  if (two && decoded_together(gpu, args.m, a, b)) return Variant::dequantize_gemm;
  const bool few = args.m <= most_gemv_rows;
  const Variant many = few && args.m < least_warpgroup_rows ? Variant::gemv : variant_of_many(gpu, args.m, a.n, a.k);
  const bool rows_fit =
      !two || (many != Variant::kbit && rows_fit_together(a, b) && (rotate_alike(passes) || rotates_inside(args, a)));
  if (few && (many != Variant::warpgroup || !rows_fit)) {
    return two && !fit_together(a, b) ? std::nullopt : std::optional(Variant::gemv);
  }
  return rows_fit ? std::optional(many) : std::nullopt;
}

inline Source source_of(const RotatedDevicePass& first, const RotatedDevicePass& pass) {
  const bool one_group = pass.group >= pass.k;
  return {reinterpret_cast<const uint4*>(pass.codes),
          reinterpret_cast<const uint4*>(pass.norms),
          pass.levels,
          pass.signs,
          static_cast<int>(groups_of(pass)),
          one_group ? 31 : std::countr_zero(static_cast<uint64_t>(pass.group)),
          table_factor(pass),
          factor_over_first(first, pass)};
}

}  // namespace w4q::kernels::rotated
