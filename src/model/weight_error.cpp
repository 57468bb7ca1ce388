#include "model/weight_error.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/measure.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::model {
namespace {

/// Weights decoded at a time by one thread: two fp32 copies stay inside the L2 cache.
constexpr int64_t block_weights = 32 * 1024;

/// The definition of the largest error and its place, for rows where it may be new or not finite.
void find_largest(std::span<const float> reference, std::span<const float> candidate, int64_t row,
                  WeightError& result) {
  for (size_t c = 0; c < reference.size(); ++c) {
    const double error = double{reference[c]} - double{candidate[c]};
    // Written so that a NaN counts as the largest error instead of as none.
    if (std::abs(error) <= result.max_error) continue;
    result.max_error = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::abs(error);
    result.row = row;
    result.col = static_cast<int64_t>(c);
  }
}

/// The sums over all rows; `each` gets those of every row by itself, unless it is null.
WeightError compare_rows(MatrixView<const float> reference, MatrixView<const float> candidate, int64_t first_row,
                         WeightError* each) {
  WeightError result;
  const auto row_of = [](MatrixView<const float> matrix, int64_t row) {
    return std::span(matrix.row(row), static_cast<size_t>(matrix.cols));
  };
  int64_t worst = -1;  // the row of the largest error, whose place is looked for once
  double largest = 0;
  for (int64_t r = 0; r < reference.rows; ++r) {
    const Difference found = difference_of(row_of(reference, r), row_of(candidate, r));
    result.signal += found.squared;
    result.noise += found.squared_error;
    if (each != nullptr) each[r] = {found.squared, found.squared_error, 0, first_row + r, 0};
    if (!std::isfinite(found.squared_error)) {
      find_largest(row_of(reference, r), row_of(candidate, r), first_row + r, result);
    } else if (found.largest > largest) {
      largest = found.largest, worst = r;
    }
  }
  if (largest > result.max_error)
    find_largest(row_of(reference, worst), row_of(candidate, worst), first_row + worst, result);
  return result;
}

/// Rows [begin, end): of F32 matrices as they stand, others decoded into `scratch`.
MatrixView<const float> float_rows(const kernels::LinearWeight& weight, int64_t begin, int64_t end, float* scratch) {
  const auto* const dense = std::get_if<kernels::LinearWeight::Dense>(&weight.matrix);
  if (dense != nullptr && dense->view.dtype == DType::f32) {
    const std::byte* const first = dense->view.bytes.data() + static_cast<size_t>(begin * weight.k) * sizeof(float);
    if (reinterpret_cast<uintptr_t>(first) % alignof(float) == 0) {
      return {reinterpret_cast<const float*>(first), end - begin, weight.k};
    }
  }
  const MatrixView<float> rows(scratch, end - begin, weight.k);
  kernels::decode_rows(weight, begin, end, rows);
  return rows;
}

}  // namespace

double WeightError::relative() const noexcept {
  if (noise == 0) return 0;
  return signal == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(noise / signal);
}

double WeightError::sqnr() const noexcept {
  if (noise == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / noise);
}

void WeightError::add(const WeightError& other) noexcept {
  signal += other.signal;
  noise += other.noise;
  if (!(other.max_error <= max_error)) {
    max_error = other.max_error;
    row = other.row;
    col = other.col;
  }
}

WeightError compare_weights(const kernels::LinearWeight& reference, const kernels::LinearWeight& candidate,
                            std::vector<WeightError>* rows_of) {
  if (reference.n != candidate.n || reference.k != candidate.k) {
    throw Error(ErrorCode::mismatch, concat(printable(candidate.name), ": the two weights differ in size"))
        .detail(
            concat("expected [", reference.n, ", ", reference.k, "], found [", candidate.n, ", ", candidate.k, "]"));
  }
  const int64_t rows = std::max<int64_t>(1, block_weights / reference.k);
  std::vector<WeightError> partial(static_cast<size_t>((reference.n + rows - 1) / rows));
  if (rows_of != nullptr) rows_of->assign(static_cast<size_t>(reference.n), {});
  parallel_for(reference.n, rows, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    const auto count = static_cast<size_t>((end - begin) * reference.k);
    if (scratch.size() < 2 * count) scratch.resize(2 * count);
    const auto a = float_rows(reference, begin, end, scratch.data());
    const auto b = float_rows(candidate, begin, end, scratch.data() + count);
    partial[static_cast<size_t>(begin / rows)] =
        compare_rows(a, b, begin, rows_of == nullptr ? nullptr : rows_of->data() + begin);
  });
  WeightError total;
  for (const auto& block : partial) total.add(block);
  return total;
}

}  // namespace w4q::model
