// Which instructions the loops that are compiled for several of them take on this machine.
#pragma once

#include <string>
#include <vector>

namespace w4q {

/// Highway's names of the instruction sets that this machine has and loops are compiled for, best first: "AVX3", "AVX2",
/// "SSE4", "SSSE3". The first is taken.
std::vector<std::string> simd_targets();

}  // namespace w4q
