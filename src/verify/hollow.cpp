#include "verify/hollow.h"

#include <algorithm>
#include <cstddef>
#include <span>

namespace w4q::verify {

bool is_hollow(const io::Checkpoint& tensors) {
  constexpr size_t looked_at = 64;
  const auto is_nothing = [](std::span<const std::byte> bytes) {
    return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{}; });
  };
  bool has_norms = false;
  for (const auto& [name, info] : tensors.tensors()) {
    const bool norm = name.ends_with("norm.weight");
    if (!norm && !name.ends_with("embed_tokens.weight")) continue;
    has_norms |= norm;
    const auto stored = tensors.load_stored(name);
    const auto bytes = stored->bytes;
    const size_t count = std::min(looked_at, bytes.size());
    if (!is_nothing(bytes.first(count)) || !is_nothing(bytes.subspan((bytes.size() - count) / 2, count)) ||
        !is_nothing(bytes.last(count))) {
      return false;
    }
  }
  return has_norms;
}

}  // namespace w4q::verify
