// Where memory on the GPU begins.
#pragma once

#include <cstddef>
#include <cstdint>

namespace w4q::device {

inline bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

/// Workspaces, and the parts of one, begin on 256 bytes.
constexpr size_t round_up_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace w4q::device
