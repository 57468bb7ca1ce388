// What the passes of a rotated linear are to the launches that multiply them: which of them go together, and with which
// factors.
#pragma once

#include <bit>
#include <span>

#include "formats/rotated.h"
#include "kernels/common/table_stretch.h"
#include "kernels/linear/kernel_row.h"
#include "kernels/rotated/launch.cuh"

namespace w4q::kernels::rotated {

using Passes = std::span<const DevicePass>;

/// Inputs that share a norm.
inline int64_t group_of(const DevicePass& pass) { return formats::rotated_group(pass.scheme, pass.k); }
inline int64_t groups_of(const DevicePass& pass) { return formats::rotated_groups(pass.scheme, pass.k); }

/// A factor that brings levels to where f16 holds the small ones too, and near numbers of f16.
inline float table_factor(const DevicePass& pass) {
  return kernels::table_factor(pass.table_max, pass.table_stretch, 10);
}

inline float factor_over_first(const DevicePass& first, const DevicePass& pass) {
  if (pass.codebook == first.codebook) return 1;
  if (pass.scheme.bits == first.scheme.bits) return pass.table_over_first / first.table_over_first;
  return table_factor(first) / table_factor(pass);
}

/// Whether two passes can share a launch of the GEMV.
inline bool fit_together(const DevicePass& a, const DevicePass& b) {
  if (a.rotation.block != b.rotation.block || !widths_fit(a.scheme.bits, b.scheme.bits)) return false;
  return a.scheme.bits != b.scheme.bits || (a.table_over_first > 0 && b.table_over_first > 0) ||
         b.codebook == a.codebook;
}

/// The same of the kernels of more rows, which multiply norms of f16 with a factor of f16.
inline bool rows_fit_together(const DevicePass& a, const DevicePass& b) {
  if (a.scheme.bits != b.scheme.bits || !fit_together(a, b) || (group_of(a) == 32) != (group_of(b) == 32)) return false;
  const float factor = factor_over_first(a, b);
  return factor > 0x1p-6f && factor < 0x1p6f && b.scale_max * factor < 0x1p15f;
}

inline bool rotate_alike(Passes passes) { return passes.front().rotation.factors == passes.back().rotation.factors; }

/// Whether a launch can rotate its input itself.
inline bool rotates_inside(const LinearDesc& desc) {
  const int64_t block = desc.pass().rotation.block;
  return !desc.input_rotated && !desc.input_scaled && block >= 32 && block <= 128 && desc.k() % block == 0;
}

inline Source source_of(const DevicePass& first, const DevicePass& pass) {
  const bool one_group = group_of(pass) >= pass.k;
  return {reinterpret_cast<const uint4*>(pass.codes),
          static_cast<const uint4*>(pass.scales),
          pass.codebook,
          pass.rotation.signs,
          static_cast<int>(groups_of(pass)),
          one_group ? 31 : std::countr_zero(static_cast<uint64_t>(group_of(pass))),
          table_factor(pass),
          factor_over_first(first, pass)};
}

}  // namespace w4q::kernels::rotated
