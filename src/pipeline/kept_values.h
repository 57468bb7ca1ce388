// Looking at what is carried into an output as it is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/dtype.h"

namespace w4q::pipeline {

/// Finds the first value that is no number among the bytes of a tensor which come one piece after the other. Infinities are
/// values that masks have. Of types other than f16, bf16 and f32 it finds none.
class KeptValues {
 public:
  explicit KeptValues(DType dtype) noexcept : dtype_(dtype) {}

  /// `bytes` from `offset` on; whole values.
  void add(int64_t offset, std::span<const std::byte> bytes);

  /// What a report says of `tensor`, if there is something to say.
  std::optional<std::string> note(std::string_view tensor) const;

 private:
  DType dtype_;
  std::optional<int64_t> first_nan_;  ///< its number in the tensor
};

}  // namespace w4q::pipeline
