// The passes of a linear layer in GPU memory: what every kernel that multiplies with weights reads, whatever their
// format. y = Σ_p W_p · R_p(x ⊘ s) + b.
#pragma once

#include <cstdint>
#include <string_view>

#include "formats/scheme.h"

namespace w4q::kernels {

/// Of the input of a pass (formats/rotation.h).
struct DeviceRotation {
  int64_t block = 1;                ///< inputs that are mixed, at least 2; 1: there is no rotation
  const float* factors = nullptr;   ///< [k]: InputRotation::factors(); equal pointers where passes share a rotation
  const uint32_t* signs = nullptr;  ///< rotation_signs (kernels/rotated/pack.h)
};

/// One pass: the planes of a layout that rows of the kernel registry read. `codes` and `scales` are aligned to 16
/// bytes.
struct DevicePass {
  formats::Scheme scheme;  ///< of rotated passes with f16 norms, whatever they are in the file
  std::string_view layout = "kbit-fragment";
  int64_t n = 0;
  int64_t k = 0;
  const uint32_t* codes = nullptr;
  const void* scales = nullptr;          ///< E4M4 bytes or f16; of rotated-fragment f16 norms at norm_place
  const float* codebook = nullptr;       ///< [2^bits]
  float table_max = 1;                   ///< largest magnitude of the codebook
  float table_stretch = 1;               ///< 1 to 2: its entries times this are nearest to f16 (table_stretch.h)
  float product_stretch = 1;             ///< the same of their products with E4M4 scales
  float table_over_first = 0;            ///< its table is this times that of the first pass; 0: they are not alike
  float scale_max = 31;                  ///< an upper bound of the scales: keeps f16 products in range
  const uint32_t* zeros = nullptr;       ///< integer, asymmetric: the zero points of the layout
  const int32_t* input_order = nullptr;  ///< integer, act order: [k] the input that stands at each place
  DeviceRotation rotation = {};
};

}  // namespace w4q::kernels
