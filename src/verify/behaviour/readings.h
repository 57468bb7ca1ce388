// Other readings of a block's tensors, and what the block would add to the residual stream if they were right.
#pragma once

#include <functional>
#include <string>

#include "verify/behaviour/passage.h"

namespace w4q::verify::behaviour {

/// What a reading is about. Another order, or another tensor's place, has no size; sizes are a matter of degree, which
/// few bits and searched scales change, too.
enum class ReadingKind { order, size };

/// A reading, as far as it has been run: what the block's last linear would read or, where that is empty, what the block
/// would add.
struct BlockReading {
  std::string what;  ///< "model.layers.3.mlp.gate_proj and up_proj exchanged"
  ReadingKind kind = ReadingKind::order;
  Activations inner = {}, added = {};
};

/// Calls `take` with each reading of the block in this place.
void for_each_reading(Passage& passage, size_t place, const std::function<void(BlockReading reading)>& take);

}  // namespace w4q::verify::behaviour
