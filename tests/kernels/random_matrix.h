// Random matrices for the kernel tests, the same on every run.
#pragma once

#include <cstdint>
#include <vector>

#include "core/parallel.h"
#include "core/rng.h"
#include "core/views.h"

namespace w4q::test {

/// rows × cols values from N(0, 1).
struct RandomMatrix {
  RandomMatrix(int64_t rows_, int64_t cols_, uint64_t seed)
      : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_)) {
    parallel_for(rows * cols, 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        values[static_cast<size_t>(i)] = static_cast<float>(random_normal(seed, static_cast<uint64_t>(i)));
      }
    });
  }
  operator MatrixView<float>() { return {values.data(), rows, cols}; }
  operator MatrixView<const float>() const { return {values.data(), rows, cols}; }
  MatrixView<float> view() { return *this; }
  const float* row(int64_t r) const { return values.data() + r * cols; }

  int64_t rows, cols;
  std::vector<float> values;
};

/// γ_k = k·u / (1 − k·u), the bound of the relative error of a sum of k products in fp32.
inline double gamma(int64_t k) {
  const double ku = static_cast<double>(k) * 0x1p-24;
  return ku / (1 - ku);
}

}  // namespace w4q::test
