// rotated-fragment: rotated weights in the order in which their kernels read them. Codes stand as in kbit-fragment
// (layout_kbit_fragment.h); norms for every 64 outputs and group of inputs together, a lane's eight beside each other:
//
//   norm = (row div 64 · groups + group) · 64 + 8 · (row mod 8) + 2 · (row mod 64 div 16) + row mod 16 div 8
//
// n is zero-padded to 64, codes along k too (docs/layouts.md).
#pragma once

#include "repack/layout_kbit_fragment.h"

namespace w4q::repack {

/// Where the norm of a row and group stands; norms of rows from n on are zero.
W4Q_HOST_DEVICE constexpr int64_t norm_place(int64_t row, int64_t group, int64_t groups) {
  return (row / 64 * groups + group) * 64 + 8 * (row % 8) + 2 * (row % 64 / 16) + row % 16 / 8;
}
/// The place of the first of the eight norms that a lane of row group `row_group` reads together, in eights; `lane` is
/// its outputs mod 8.
W4Q_HOST_DEVICE constexpr int64_t norm_eight(int64_t row_group, int group, int groups, int lane) {
  return (row_group * groups + group) * 8 + lane;
}
constexpr int64_t norm_count(int64_t n, int64_t groups) { return (n + 63) / 64 * 64 * groups; }

namespace detail {

/// The 64 norms of a group are 64 places.
constexpr bool norm_place_is_bijection() {
  uint64_t taken = 0;
  for (int64_t row = 0; row < 64; ++row) taken |= uint64_t{1} << norm_place(row, 0, 1);
  return taken == ~uint64_t{0};
}
static_assert(norm_place_is_bijection());

constexpr bool norm_eights_are_places() {
  for (int64_t row = 0; row < 64; ++row) {
    const int64_t first = 8 * norm_eight(2, 1, 3, static_cast<int>(row % 8));
    if (norm_place(128 + row, 1, 3) != first + 2 * (row / 16) + row % 16 / 8) return false;
  }
  return true;
}
static_assert(norm_eights_are_places());

}  // namespace detail
}  // namespace w4q::repack
