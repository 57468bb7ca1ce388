// Linears of other people's checkpoints, loaded by way of their dialect.
#pragma once

#include "checkpoint/packed_checkpoint.h"
#include "formats/packed.h"
#include "io/checkpoint.h"

namespace w4q::checkpoint {

/// Loads the tensors in info.stored, checks types and shapes, decodes and validates. Throws bad_file naming the tensor.
formats::PackedLinear load_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info);

}  // namespace w4q::checkpoint
