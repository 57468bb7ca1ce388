// The two passes of the rotated quantizer over a matrix on a GPU. What lies between them, storing norms, is
// the CPU's: one value for a group. Equal to the CPU bit for bit (class E0).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "device/context.h"
#include "formats/packed.h"

namespace w4q::quantize {

/// formats::rotated_norm of every group, n × groups. Throws device.
std::vector<double> rotated_norms_cuda(const TensorView& weight, int64_t group, device::Context& gpu);

/// The codes of `packed`, whose norms, decoded, are `norms`: n × groups. Throws device.
void rotated_codes_cuda(const TensorView& weight, std::span<const float> norms, std::span<const float> midpoints,
                        formats::PackedWeight& packed, device::Context& gpu);

}  // namespace w4q::quantize
