// Linears of other people's checkpoints, loaded by way of their dialect.
#pragma once

#include "formats/packed.h"
#include "io/checkpoint.h"
#include "model/packed_checkpoint.h"

namespace w4q::model {

/// Loads the tensors in info.stored, checks types and shapes, decodes and validates. Throws bad_file naming the tensor.
formats::PackedLinear load_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info);

}  // namespace w4q::model
