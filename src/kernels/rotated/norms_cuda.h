// Scales of canonical, rotated-fragment or kbit-fragment planes as the norms that kernels of rotated weights read: the
// norms of rotated_planes (pack.h), bit for bit.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "formats/scheme.h"

namespace w4q::kernels {

/// Where the scale of a row and group stands.
enum class NormOrder { canonical, rotated_fragment, kbit_fragment };

struct NormSource {
  const void* scales = nullptr;
  formats::ScaleType type = formats::ScaleType::f16;  ///< E4M4, f16 or f32
  NormOrder order = NormOrder::canonical;             ///< kbit_fragment: k is a multiple of 64, groups of 32
  int64_t n = 0, groups = 0;
  int exponent = 0;  ///< norms are scales · 2^exponent
};

/// Queues norms[norm_place(row, group)] = f16(scale · 2^exponent), rounded to nearest even; of rows from n on zero.
/// `norms` has norm_count(n, groups) values.
void norms_cuda(const NormSource& source, uint16_t* norms, const device::Stream& stream);

}  // namespace w4q::kernels
