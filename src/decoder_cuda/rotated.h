// Rotated passes of linear layers on their way to the GPU (docs/rotated.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decoder_cuda/offload.h"
#include "decoder_cuda/ring.h"
#include "device/buffer.h"
#include "formats/packed.h"
#include "kernels/linear/device_linear.h"

namespace w4q::decoder_cuda {

/// Whether the GPU rotates inputs so.
bool reads_rotation(const formats::Rotation& rotation);

/// The rotation of pass `index` on the GPU: that of one of the passes before it where they share it, else in a part of
/// `memory`.
kernels::DeviceRotation upload_rotation(const formats::PackedLinear& linear, size_t index,
                                        std::span<const kernels::DevicePass> before, UploadRing& ring,
                                        std::vector<device::DeviceBuffer>& memory);

/// Whether the GPU's kernels multiply all passes of `linear` as they are: rotated ones, and kbit behind a rotation, in
/// the canonical layout or the fragments that kernels read.
bool reads_rotated(const formats::PackedLinear& linear);

/// Whether the rows of two such linears can stand below one another.
bool can_stack_rotated(const formats::PackedLinear& a, const formats::PackedLinear& b);

/// The passes of linears below one another, in GPU memory; those that are not there have no codes and norms.
struct CudaRotated {
  std::vector<kernels::DevicePass> passes;
  std::vector<std::shared_ptr<const OffloadedPass>> offloaded;  ///< one for each pass, null where it is in GPU memory
  std::vector<device::DeviceBuffer> memory;
  int64_t bytes = 0;  ///< of GPU memory that a product reads
};

/// Below one another, or `rows_in_turn` rows of each in turn (stack.h). With `offload`, all passes but the first stay in
/// host memory. What is stored as kernels read it is queued and checked (stored.h). Throws device when the memory does
/// not suffice.
CudaRotated upload_rotated(std::span<const formats::PackedLinear* const> linears, int64_t rows_in_turn, bool offload,
                           UploadRing& ring);

/// A pass's planes in host memory; waits. `error` as OffloadCandidate has it.
std::shared_ptr<const OffloadedPass> move_to_host(const device::DeviceBuffer& codes, const device::DeviceBuffer& norms,
                                                  double error, const device::Stream& stream);

/// `pass` with the planes that stand at `bytes`.
kernels::DevicePass at_bytes(kernels::DevicePass pass, const OffloadedPass& planes, const std::byte* bytes);

}  // namespace w4q::decoder_cuda
