#include "model/weight_error.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::model {
namespace {

/// Weights decoded at a time by one thread: two fp32 copies stay inside the L2 cache.
constexpr int64_t block_weights = 32 * 1024;

void compare_row(const float* reference, const float* candidate, int64_t k, int64_t row, WeightError& result) {
  for (int64_t c = 0; c < k; ++c) {
    const double value = reference[c];
    const double error = value - candidate[c];
    result.signal += value * value;
    result.noise += error * error;
    // Written so that a NaN counts as the largest error instead of as none.
    if (!(std::abs(error) <= result.max_error)) {
      result.max_error = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::abs(error);
      result.row = row;
      result.col = c;
    }
  }
}

/// The sums over all rows; `each` gets those of every row by itself, unless it is null.
WeightError compare_rows(MatrixView<const float> reference, MatrixView<const float> candidate, int64_t first_row,
                         WeightError* each) {
  WeightError result;
  for (int64_t r = 0; r < reference.rows; ++r) {
    const WeightError before = result;
    compare_row(reference.row(r), candidate.row(r), reference.cols, first_row + r, result);
    if (each != nullptr) each[r] = {result.signal - before.signal, result.noise - before.noise, 0, first_row + r, 0};
  }
  return result;
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
    const MatrixView<float> a(scratch.data(), end - begin, reference.k);
    const MatrixView<float> b(scratch.data() + count, end - begin, reference.k);
    kernels::decode_rows(reference, begin, end, a);
    kernels::decode_rows(candidate, begin, end, b);
    partial[static_cast<size_t>(begin / rows)] =
        compare_rows(a, b, begin, rows_of == nullptr ? nullptr : rows_of->data() + begin);
  });
  WeightError total;
  for (const auto& block : partial) total.add(block);
  return total;
}

}  // namespace w4q::model
