// Files that were made to measure with.
#pragma once

#include "io/checkpoint.h"

namespace w4q::verify {

/// Whether all norms and tables of tokens, which hardly anybody packs, are zeros, as far as their first, middle and last
/// bytes tell: such a file, a hole on the disk, or what was made of it, has no weights that could have been lost.
bool is_hollow(const io::Checkpoint& tensors);

}  // namespace w4q::verify
