// Parts of matrices of activations, as the decoder and its gradient take them apart and put them together.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/views.h"
#include "model/config.h"

namespace w4q::model {

/// x = x · factor, in fp32.
inline void scale_rows(MatrixView<float> x, double factor) {
  if (factor == 1) return;
  const auto narrow = static_cast<float>(factor);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) x.row(r)[c] *= narrow;
  }
}

/// Columns [begin, begin + count).
inline MatrixView<float> columns(MatrixView<float> x, int64_t begin, int64_t count) {
  return {x.data + begin, x.rows, count, x.stride};
}

/// Columns begin, begin + step, … of `from`.
inline void pick(MatrixView<const float> from, int64_t begin, int64_t step, MatrixView<float> to) {
  for (int64_t r = 0; r < to.rows; ++r) {
    for (int64_t c = 0; c < to.cols; ++c) to.row(r)[c] = from.row(r)[begin + c * step];
  }
}

/// The other way: into columns begin, begin + step, … of `to`.
inline void place(MatrixView<const float> from, MatrixView<float> to, int64_t begin, int64_t step) {
  for (int64_t r = 0; r < from.rows; ++r) {
    for (int64_t c = 0; c < from.cols; ++c) to.row(r)[begin + c * step] = from.row(r)[c];
  }
}

/// Queries far behind the positions of training are scaled up; row r stands at `position` + r.
inline void warm_queries(const AttentionConfig& attention, int64_t position, MatrixView<float> queries) {
  if (attention.temperature == 0) return;
  for (int64_t r = 0; r < queries.rows; ++r) {
    const auto passed = static_cast<double>((position + r) / attention.temperature_length);
    scale_rows({queries.row(r), 1, queries.cols}, 1 + attention.temperature * std::log(1 + passed));
  }
}

}  // namespace w4q::model
