// fp32 memory that grows with what is asked of it.
#pragma once

#include <cstdint>
#include <memory>

#include "core/views.h"

namespace w4q::model {

/// Not initialised: a cache of many positions costs only what is used.
class Floats {
 public:
  /// The memory as a matrix; what an earlier matrix held is lost when this one is larger.
  MatrixView<float> matrix(int64_t rows, int64_t cols) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    if (count > size_) {
      data_ = std::make_unique_for_overwrite<float[]>(count);
      size_ = count;
    }
    return {data_.get(), rows, cols};
  }
  float* data() const noexcept { return data_.get(); }

 private:
  std::unique_ptr<float[]> data_;
  size_t size_ = 0;
};

}  // namespace w4q::model
