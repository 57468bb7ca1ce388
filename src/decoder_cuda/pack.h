// Packed weights on their way to the GPU: from canonical planes to the layout that its kernels read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "device/buffer.h"
#include "formats/packed.h"
#include "kernels/linear/device_linear.h"

namespace w4q::decoder_cuda {

/// The layout in which kernels read weights of this scheme and size; empty where there is none.
std::string_view device_layout(const device::Properties& gpu, const formats::Scheme& scheme, int64_t n, int64_t k);
/// The same of a weight: where it is not canonical its own layout, or none.
std::string_view kernel_layout(const device::Properties& gpu, const formats::PackedWeight& weight);

/// What DevicePass::scale_max is at least.
inline constexpr float least_scale_max = 0x1p-14f;
/// Sets what kernels know of a kbit table.
void describe_table(std::span<const float> table, kernels::DevicePass& pass);
/// With act order: which input stands at each place of codes that are sorted by group.
std::vector<int32_t> sorted_inputs(const formats::PackedWeight& weight);

/// A weight in GPU memory and what holds its planes.
struct CudaPacked {
  kernels::DevicePass weight;
  std::vector<device::DeviceBuffer> memory;
  int64_t bytes = 0;  ///< that a product reads
};

/// Stacks canonical weights that can_stack and have a device_layout: one below the other, or `rows_in_turn` rows of
/// each in turn (of one size, a multiple of it). Returns with everything in place. Throws device when the memory does
/// not suffice.
CudaPacked pack_for_device(std::span<const formats::PackedWeight* const> weights, const device::Stream& stream,
                           int64_t rows_in_turn = 0);

}  // namespace w4q::decoder_cuda
