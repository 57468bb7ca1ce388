#include "quantize/statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/linear/gemm.h"

namespace w4q::quantize {
namespace {

/// Rows whose products are summed in fp32 before fp64 takes over.
constexpr int64_t chunk_rows = 512;
/// A tile of the Gram matrix that one task computes: its fp32 scratch is 256 KiB.
constexpr int64_t tile_rows = 128;
constexpr int64_t tile_cols = 512;
/// Channels that one task sums.
constexpr int64_t channel_grain = 64;
/// Rows and columns that are turned over at once.
constexpr int64_t turned = 16;

struct Tile {
  int64_t row = 0;
  int64_t col = 0;
};

/// Tiles that touch the upper triangle of a k × k matrix, or all of them.
std::vector<Tile> tiles_of(int64_t k, bool upper) {
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < k; row += tile_rows) {
    for (int64_t col = upper ? row : 0; col < k; col += tile_cols) tiles.push_back({row, col});
  }
  return tiles;
}

/// A square of x [rows, k] from (row, col) on to `to`, whose rows are `stride` apart, turned over. By way of memory of its
/// own: columns of `to` that are written at a distance of a power of two throw each other out of the cache.
void turn_square(MatrixView<const float> x, int64_t row, int64_t col, int64_t rows, int64_t cols, float* to,
                 int64_t stride) {
  float square[turned * turned];
  for (int64_t r = 0; r < rows; ++r) {
    const float* const from = x.row(row + r) + col;
    for (int64_t c = 0; c < cols; ++c) square[c * turned + r] = from[c];
  }
  for (int64_t c = 0; c < cols; ++c) std::copy_n(square + c * turned, rows, to + c * stride);
}

/// x [rows, k] as [k, rows]: the sums over rows become dot products of contiguous values.
std::unique_ptr<float[]> transposed(MatrixView<const float> x) {
  auto result = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(x.rows * x.cols));
  parallel_for(x.cols, channel_grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += turned) {
      for (int64_t r = 0; r < x.rows; r += turned) {
        turn_square(x, r, c, std::min(turned, x.rows - r), std::min(turned, end - c), result.get() + c * x.rows + r,
                    x.rows);
      }
    }
  });
  return result;
}

/// Σ |x| and Σ x² of `count` neighbouring channels of x [rows, k], each over the rows in their order.
template <int count>
void add_neighbours(MatrixView<const float> x, int64_t first, double* sum_abs, double* sum_squares) {
  std::array<double, count> absolute{}, squares{};
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* const values = x.row(r) + first;
    for (size_t c = 0; c < count; ++c) {
      const double value = values[c];
      absolute[c] += std::abs(value);
      squares[c] += value * value;
    }
  }
  for (size_t c = 0; c < count; ++c) sum_abs[c] += absolute[c], sum_squares[c] += squares[c];
}

void add_channels(InputStatistics& statistics, MatrixView<const float> rows) {
  constexpr int together = 8;  // sums that do not wait for each other
  parallel_for(rows.cols, channel_grain, [&](int64_t begin, int64_t end) {
    double *const sum_abs = statistics.sum_abs.data(), *const sum_squares = statistics.sum_squares.data();
    int64_t c = begin;
    for (; c + together <= end; c += together) add_neighbours<together>(rows, c, sum_abs + c, sum_squares + c);
    for (; c < end; ++c) add_neighbours<1>(rows, c, sum_abs + c, sum_squares + c);
  });
}

/// Adds the part of left · rightᵀ [k, k] that a tile covers: `row_of(i)` is where the sums of row i stand, `first(i)` the
/// first column that counts. Both have a channel a row.
template <class RowOf, class First>
void add_tile(MatrixView<const float> left, MatrixView<const float> right, const Tile& tile, const RowOf& row_of,
              const First& first) {
  const int64_t rows = std::min(tile_rows, left.rows - tile.row), cols = std::min(tile_cols, right.rows - tile.col);
  const auto products = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * cols));
  kernels::gemm_nt({left.row(tile.row), rows, left.cols}, {right.row(tile.col), cols, right.cols},
                   {products.get(), rows, cols});
  for (int64_t i = 0; i < rows; ++i) {
    double* sums = row_of(tile.row + i);
    const float* const own = products.get() + i * cols - tile.col;
    for (int64_t j = std::max(first(tile.row + i), tile.col); j < tile.col + cols; ++j) sums[j] += own[j];
  }
}

void add_chunk(InputStatistics& statistics, MatrixView<const float> rows) {
  add_channels(statistics, rows);
  if (!statistics.has_gram()) return;
  const auto values = transposed(rows);
  const MatrixView<const float> channels(values.get(), rows.cols, rows.rows);
  const int64_t k = channels.rows;
  const auto tiles = tiles_of(k, true);
  const auto row_of = [&](int64_t i) { return statistics.gram.data() + triangle_row(k, i) - i; };
  parallel_for(std::ssize(tiles), 1, [&](int64_t i, int64_t) {
    add_tile(channels, channels, tiles[static_cast<size_t>(i)], row_of, [](int64_t row) { return row; });
  });
}

std::vector<float> means(const std::vector<double>& sums, int64_t count) {
  std::vector<float> result(sums.size());
  const double scale = count > 0 ? 1.0 / static_cast<double>(count) : 0.0;
  for (size_t i = 0; i < sums.size(); ++i) result[i] = static_cast<float>(sums[i] * scale);
  return result;
}

void add_all(std::vector<double>& sums, const std::vector<double>& other) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += other[i];
}

}  // namespace

std::vector<float> InputStatistics::mean_abs() const { return means(sum_abs, count); }
std::vector<float> InputStatistics::mean_squares() const { return means(sum_squares, count); }

void check_finite(const InputStatistics& statistics, std::string_view name) {
  for (size_t c = 0; c < statistics.sum_squares.size(); ++c) {
    // A finite sum of squares of finite floats cannot overflow fp64, so this finds every NaN and infinity.
    if (std::isfinite(statistics.sum_squares[c])) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": the activations of channel ", c, " are not finite"))
        .hint("w4q verify MODEL finds weights that are NaN or infinite");
  }
}

InputStatistics make_statistics(int64_t width, bool with_gram) {
  InputStatistics result;
  result.width = width;
  result.sum_abs.resize(static_cast<size_t>(width));
  result.sum_squares.resize(static_cast<size_t>(width));
  if (with_gram) result.gram.resize(static_cast<size_t>(triangle_size(width)));
  return result;
}

void add_rows(InputStatistics& statistics, MatrixView<const float> rows, std::string_view name) {
  if (rows.cols != statistics.width) {
    throw Error(ErrorCode::mismatch, concat(printable(name), ": activations of another width"))
        .detail(concat("expected ", statistics.width, " channels, got ", rows.cols));
  }
  for (int64_t begin = 0; begin < rows.rows; begin += chunk_rows) {
    add_chunk(statistics, {rows.row(begin), std::min(chunk_rows, rows.rows - begin), rows.cols, rows.stride});
  }
  statistics.count += rows.rows;
  check_finite(statistics, name);
}

void add_products(MatrixView<const float> left, MatrixView<const float> right, std::span<double> sums) {
  const int64_t k = left.cols;
  ensure(right.cols == k && right.rows == left.rows && std::ssize(sums) == k * k, "add_products: other shapes");
  const auto tiles = tiles_of(k, false);
  const auto row_of = [&](int64_t i) { return sums.data() + i * k; };
  for (int64_t begin = 0; begin < left.rows; begin += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, left.rows - begin);
    const auto a = transposed({left.row(begin), rows, k, left.stride});
    const auto b = transposed({right.row(begin), rows, k, right.stride});
    parallel_for(std::ssize(tiles), 1, [&](int64_t i, int64_t) {
      add_tile({a.get(), k, rows}, {b.get(), k, rows}, tiles[static_cast<size_t>(i)], row_of,
               [](int64_t) { return int64_t{0}; });
    });
  }
}

void merge(InputStatistics& statistics, const InputStatistics& other, std::string_view name) {
  if (statistics.width != other.width || statistics.has_gram() != other.has_gram()) {
    const auto text = [](const InputStatistics& which) {
      return concat(which.width, " channels ", which.has_gram() ? "with" : "without", " Gram matrix");
    };
    throw Error(ErrorCode::mismatch, concat(printable(name), ": statistics that cannot be added"))
        .detail(concat("one has ", text(statistics), ", the other ", text(other)));
  }
  statistics.count += other.count;
  add_all(statistics.sum_abs, other.sum_abs);
  add_all(statistics.sum_squares, other.sum_squares);
  add_all(statistics.gram, other.gram);
}

namespace {

/// Both sides of the diagonal of a triangle's values.
template <class Triangle, class Value>
void mirror(const Triangle& triangle, int64_t k, std::span<float> to, const Value& value_of) {
  parallel_for(k, channel_grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto* values = triangle.data() + triangle_row(k, i) - i;
      for (int64_t j = i; j < k; ++j) {
        const float value = value_of(values[j]);
        to[static_cast<size_t>(i * k + j)] = value;
        to[static_cast<size_t>(j * k + i)] = value;
      }
    }
  });
}

}  // namespace

std::vector<float> mean_gram(const InputStatistics& statistics) {
  ensure(statistics.gpu_gram == nullptr, "mean_gram: the matrix stands on the GPU");
  const int64_t k = statistics.width;
  std::vector<float> result(static_cast<size_t>(k * k));
  const double scale = statistics.count > 0 ? 1.0 / static_cast<double>(statistics.count) : 0.0;
  if (!statistics.has_gram()) {
    for (int64_t i = 0; i < k; ++i)
      result[static_cast<size_t>(i * k + i)] =
          static_cast<float>(statistics.sum_squares[static_cast<size_t>(i)] * scale);
    return result;
  }
  mirror(statistics.gram, k, result, [scale](double sum) { return mean_of_sum(sum, scale); });
  return result;
}

std::vector<float> supported_gram(const InputStatistics& statistics) {
  std::vector<float> result = mean_gram(statistics);
  const int64_t k = statistics.width;
  const double share = supported_share(statistics.count, k, noise_of_inputs);
  for (int64_t at = 0; at < k * k; ++at) {
    if (at / k == at % k) continue;
    float& value = result[static_cast<size_t>(at)];
    value = supported_mean(value, share);
  }
  return result;
}

std::vector<float> expand_triangle(std::span<const float> triangle, int64_t k) {
  ensure(std::ssize(triangle) == triangle_size(k), "expand_triangle: another size");
  std::vector<float> result(static_cast<size_t>(k * k));
  mirror(triangle, k, result, [](float value) { return value; });
  return result;
}

void support_by_tokens(std::span<float> triangle, int64_t width, int64_t tokens) {
  ensure(static_cast<int64_t>(triangle.size()) == triangle_size(width), "support_by_tokens: shapes do not fit");
  const double share = supported_share(tokens, width);
  size_t at = 0;
  for (int64_t row = 0; row < width; ++row) {
    ++at;  // the diagonal
    for (int64_t column = row + 1; column < width; ++column, ++at) {
      triangle[at] = supported_mean(triangle[at], share);
    }
  }
}

}  // namespace w4q::quantize
