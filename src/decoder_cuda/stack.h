// Canonical weights that become one: their rows below one another, or so many rows of each in turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "device/buffer.h"
#include "formats/packed.h"

namespace w4q::decoder_cuda {

using Weights = std::span<const formats::PackedWeight* const>;

/// Whether the rows of two weights can stand below one another in one weight.
bool can_stack(const formats::PackedWeight& a, const formats::PackedWeight& b);

/// Rows of all together.
int64_t rows_of(Weights weights);

/// How a plane of one weight lies in the plane of the stack: pieces of `piece` bytes, `pitch` apart, from `first` on.
struct Pieces {
  std::span<const std::byte> bytes;
  size_t first, piece, pitch;
};

/// A plane of each weight: one below the other, or with `rows_in_turn` so many rows of each in turn; weights of one
/// size then, a multiple of it.
std::vector<Pieces> lay_out(Weights weights, formats::PlaneRole role, int64_t rows_in_turn);

/// The plane of the stack. On the GPU the copies are on their way: the weights must stay.
Buffer stack_on_host(std::span<const Pieces> planes);
device::DeviceBuffer stack_on_gpu(std::span<const Pieces> planes, const device::Stream& stream);

/// All planes of small floats but factors, and scales that rows share or have alone: each row has one that is 1.
formats::PackedWeight stack_floats(Weights weights, int64_t rows_in_turn);

/// All planes.
formats::PackedWeight stack(Weights weights, int64_t rows_in_turn);

}  // namespace w4q::decoder_cuda
