// The way from what the environment says to the other ranks.
#pragma once

#include "ranks/ranks.h"
#include "ranks/transport.h"

namespace w4q::ranks {

/// Throws unsupported where this program was built without MPI, or MPI cannot be loaded or started.
Transport& connect(const Launched& found);

}  // namespace w4q::ranks
