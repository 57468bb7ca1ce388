#include "pipeline/rotated_weight.h"

#include <utility>
#include <vector>

#include "core/parallel.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t grain = 16;

std::span<float> row_of(MatrixView<float> matrix, int64_t row) {
  return {matrix.row(row), static_cast<size_t>(matrix.cols)};
}

void transpose(MatrixView<float> square) {
  for (int64_t i = 0; i < square.rows; ++i) {
    for (int64_t j = 0; j < i; ++j) std::swap(square.row(i)[j], square.row(j)[i]);
  }
}

/// D·Rᵀ, and then its columns as rows.
template <class TurnRows>
void turn_products(MatrixView<float> products, TurnRows&& turn_rows) {
  turn_rows(products);
  transpose(products);
  turn_rows(products);
  transpose(products);
}

/// What rounding makes unequal on both sides of the diagonal becomes equal again.
template <class TurnRows>
void turn_gram(MatrixView<float> gram, TurnRows&& turn_rows) {
  turn_products(gram, turn_rows);
  for (int64_t i = 0; i < gram.rows; ++i) {
    for (int64_t j = 0; j < i; ++j) gram.row(i)[j] = gram.row(j)[i] = (gram.row(i)[j] + gram.row(j)[i]) / 2;
  }
}

}  // namespace

void rotate_rows(MatrixView<float> weight, const formats::InputRotation& rotation) {
  parallel_for(weight.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) rotation.rotate(row_of(weight, r));
  });
}

void restore_rows(MatrixView<float> weight, const formats::InputRotation& rotation) {
  parallel_for(weight.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) rotation.restore(row_of(weight, r));
  });
}

void rotate_gram(MatrixView<float> gram, const formats::InputRotation& rotation) {
  turn_gram(gram, [&](auto rows) { rotate_rows(rows, rotation); });
}

void restore_gram(MatrixView<float> gram, const formats::InputRotation& rotation) {
  turn_gram(gram, [&](auto rows) { restore_rows(rows, rotation); });
}

void rotate_products(MatrixView<float> products, const formats::InputRotation& rotation) {
  turn_products(products, [&](auto rows) { rotate_rows(rows, rotation); });
}

void restore_products(MatrixView<float> products, const formats::InputRotation& rotation) {
  turn_products(products, [&](auto rows) { restore_rows(rows, rotation); });
}

quantize::Rounding in_rotated_basis(quantize::Rounding rounding, const formats::InputRotation& rotation) {
  rounding.round = [round = std::move(rounding.round), &rotation](MatrixView<float> weights) {
    for (int64_t r = 0; r < weights.rows; ++r) rotation.rotate(row_of(weights, r));
    round(weights);
    for (int64_t r = 0; r < weights.rows; ++r) rotation.restore(row_of(weights, r));
  };
  return rounding;
}

}  // namespace w4q::pipeline
