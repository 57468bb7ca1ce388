#include "formats/dialect/stored_tensor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {

StoredTensor allocate_stored(StoredSpec spec) {
  const auto size = static_cast<size_t>(byte_count(spec.dtype, spec.shape));
  return {std::move(spec), Buffer(size)};
}

const StoredTensor* find_stored(std::span<const StoredTensor> tensors, std::string_view suffix) noexcept {
  const auto found =
      std::ranges::find_if(tensors, [&](const StoredTensor& tensor) { return tensor.spec.suffix == suffix; });
  return found == tensors.end() ? nullptr : &*found;
}

const StoredTensor& stored(std::span<const StoredTensor> tensors, std::string_view suffix) {
  const StoredTensor* found = find_stored(tensors, suffix);
  ensure(found != nullptr, concat("a stored linear has no tensor ", suffix));
  return *found;
}

}  // namespace w4q::formats
