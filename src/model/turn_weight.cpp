#include "model/turn_weight.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace w4q::model {
namespace {

constexpr int64_t row_grain = 32;
/// Columns that are turned together: a few cache lines of every row.
constexpr int64_t column_grain = 64;

/// The columns from `begin` to `end` of rotation.k() rows, by way of a copy in which they are rows.
void turn_columns(MatrixView<float> rows, int64_t begin, int64_t end, const formats::InputRotation& rotation,
                  std::vector<float>& copy) {
  const auto height = static_cast<size_t>(rows.rows);
  copy.resize(static_cast<size_t>(end - begin) * height);
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t c = begin; c < end; ++c) copy[static_cast<size_t>(c - begin) * height + r] = rows.row(r)[c];
  }
  for (int64_t c = begin; c < end; ++c) {
    rotation.rotate(std::span(copy).subspan(static_cast<size_t>(c - begin) * height, height));
  }
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t c = begin; c < end; ++c) rows.row(r)[c] = copy[static_cast<size_t>(c - begin) * height + r];
  }
}

/// change(row, its number) for every row, on all threads.
template <class Change>
void each_row(MatrixView<float> weight, const Change& change) {
  parallel_for(weight.rows, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      change(std::span(weight.row(r), static_cast<size_t>(weight.cols)), static_cast<size_t>(r));
    }
  });
}

void check_scales(int64_t count, std::span<const float> scales) {
  ensure(static_cast<int64_t>(scales.size()) == count, "a weight is scaled by too many or too few scales");
}

}  // namespace

void multiply_columns(MatrixView<float> weight, std::span<const float> scales) {
  check_scales(weight.cols, scales);
  each_row(weight, [&](std::span<float> row, size_t) {
    for (size_t c = 0; c < row.size(); ++c) row[c] *= scales[c];
  });
}

void divide_columns(MatrixView<float> weight, std::span<const float> scales) {
  check_scales(weight.cols, scales);
  each_row(weight, [&](std::span<float> row, size_t) {
    for (size_t c = 0; c < row.size(); ++c) row[c] /= scales[c];
  });
}

void multiply_rows(MatrixView<float> weight, std::span<const float> scales) {
  check_scales(weight.rows, scales);
  each_row(weight, [&](std::span<float> row, size_t r) {
    for (float& value : row) value *= scales[r];
  });
}

void divide_rows(MatrixView<float> weight, std::span<const float> scales) {
  check_scales(weight.rows, scales);
  each_row(weight, [&](std::span<float> row, size_t r) {
    for (float& value : row) value /= scales[r];
  });
}

void turn_inputs(MatrixView<float> weight, const formats::InputRotation& rotation) {
  const auto width = static_cast<size_t>(rotation.k());
  ensure(weight.cols % rotation.k() == 0, "turn_inputs: columns are no multiple of the rotation");
  each_row(weight, [&](std::span<float> row, size_t) {
    for (size_t c = 0; c < row.size(); c += width) rotation.rotate(row.subspan(c, width));
  });
}

void turn_outputs(MatrixView<float> weight, const formats::InputRotation& rotation) {
  const int64_t height = rotation.k();
  ensure(weight.rows % height == 0, "turn_outputs: rows are no multiple of the rotation");
  const int64_t strips = (weight.cols + column_grain - 1) / column_grain;
  parallel_for(weight.rows / height * strips, 1, [&](int64_t first, int64_t last) {
    std::vector<float> copy;
    for (int64_t task = first; task < last; ++task) {
      const int64_t column = task % strips * column_grain;
      const MatrixView<float> rows(weight.row(task / strips * height), height, weight.cols, weight.stride);
      turn_columns(rows, column, std::min(column + column_grain, weight.cols), rotation, copy);
    }
  });
}

}  // namespace w4q::model
