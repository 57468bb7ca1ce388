// The tensors of one linear layer as somebody else's checkpoint has them: what the codecs of dialects read and write
// (docs/dialects.md).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/dtype.h"
#include "core/views.h"

namespace w4q::formats {

/// Type and shape of a tensor. Its name in the checkpoint is the linear's with `suffix` behind it: ".qweight".
struct StoredSpec {
  std::string suffix;
  DType dtype = DType::u8;
  Shape shape;

  bool operator==(const StoredSpec&) const = default;
};

struct StoredTensor {
  StoredSpec spec;
  Buffer bytes;
};

/// A zeroed tensor.
StoredTensor allocate_stored(StoredSpec spec);
/// The tensor with this suffix; nullptr when there is none.
const StoredTensor* find_stored(std::span<const StoredTensor> tensors, std::string_view suffix) noexcept;
/// The same where there must be one. Throws internal.
const StoredTensor& stored(std::span<const StoredTensor> tensors, std::string_view suffix);

}  // namespace w4q::formats
