#include "quantize/asymmetric.h"

#include <algorithm>
#include <span>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"

namespace w4q::quantize {
namespace {

/// Rows of a task: enough that drift and factor are read seldom.
constexpr int64_t task_rows = 64;
/// Columns that are solved for before products take what they are worth to the others.
constexpr int64_t solve_columns = 64;

/// x·(M·diag(D)·Mᵀ)⁻¹ of rows x in place, columns by positions of the factor, whose pivots are relative to `mean`.
class Solver {
 public:
  Solver(const ErrorFactor& factor, double mean, MatrixView<float> x)
      : coupling_(factor.coupling()), pivots_(factor.pivots()), mean_(mean), x_(x) {}

  void run() {
    const int64_t k = x_.cols;
    for (int64_t end = k; end > 0; end -= std::min(end, solve_columns))
      from_behind(std::max<int64_t>(0, end - solve_columns), end);
    for (int64_t c = 0; c < k; ++c) {
      const auto by = static_cast<float>(1 / (mean_ * static_cast<double>(pivots_[static_cast<size_t>(c)])));
      for (int64_t r = 0; r < x_.rows; ++r) x_.row(r)[c] *= by;
    }
    for (int64_t begin = 0; begin < k; begin += solve_columns) from_before(begin, std::min(k, begin + solve_columns));
  }

 private:
  /// x_c −= Σ_{j > c} x_j·M_cj.
  void from_behind(int64_t begin, int64_t end) {
    const int64_t behind = x_.cols - end;
    if (behind > 0) {
      const auto sums = product(begin, end);
      kernels::gemm_nn({x_.row(0) + end, x_.rows, behind, x_.stride},
                       {coupling_.row(end) + begin, behind, end - begin, coupling_.stride}, sums);
      subtract(sums, begin);
    }
    for (int64_t r = 0; r < x_.rows; ++r) {
      float* const row = x_.row(r);
      for (int64_t j = end - 1; j > begin; --j) {
        for (int64_t c = begin; c < j; ++c) row[c] -= row[j] * coupling_.row(j)[c];
      }
    }
  }

  /// x_c −= Σ_{j < c} x_j·M_jc.
  void from_before(int64_t begin, int64_t end) {
    if (begin > 0) {
      const auto sums = product(begin, end);
      kernels::gemm_nt({x_.row(0), x_.rows, begin, x_.stride},
                       {coupling_.row(begin), end - begin, begin, coupling_.stride}, sums);
      subtract(sums, begin);
    }
    for (int64_t r = 0; r < x_.rows; ++r) {
      float* const row = x_.row(r);
      for (int64_t c = begin + 1; c < end; ++c) {
        float sum = 0;
        for (int64_t j = begin; j < c; ++j) sum += row[j] * coupling_.row(c)[j];
        row[c] -= sum;
      }
    }
  }

  MatrixView<float> product(int64_t begin, int64_t end) {
    products_.resize(static_cast<size_t>(x_.rows * (end - begin)));
    return {products_.data(), x_.rows, end - begin};
  }
  void subtract(MatrixView<const float> sums, int64_t begin) {
    for (int64_t r = 0; r < x_.rows; ++r) {
      for (int64_t c = 0; c < sums.cols; ++c) x_.row(r)[begin + c] -= sums.row(r)[c];
    }
  }

  MatrixView<const float> coupling_;
  std::span<const float> pivots_;
  double mean_;
  MatrixView<float> x_;
  std::vector<float> products_;
};

/// What of a row's move, which stands by positions of `order`, may be made.
float part_of_move(const float* row, std::span<const float> move, std::span<const int32_t> order,
                   const MoveLimit& limit) {
  double own = 0, size = 0, along = 0;
  for (size_t p = 0; p < move.size(); ++p) {
    const double value = row[order[p]], step = move[p];
    own += value * value, size += step * step, along += value * step;
  }
  return static_cast<float>(quantize::part_of_move(own, size, along, limit));
}

}  // namespace

InputPair make_input_pair(int64_t width) {
  return {make_statistics(width, true), std::vector<double>(static_cast<size_t>(width * width)), nullptr};
}

void add_rows(InputPair& pair, MatrixView<const float> plain, MatrixView<const float> quantized,
              std::string_view name) {
  add_rows(pair.quantized, quantized, name);
  std::vector<float> apart(static_cast<size_t>(plain.rows * plain.cols));
  for (int64_t r = 0; r < plain.rows; ++r) {
    std::transform(plain.row(r), plain.row(r) + plain.cols, quantized.row(r), apart.data() + r * plain.cols,
                   [](float x, float rounded) { return x - rounded; });
  }
  add_products({apart.data(), plain.rows, plain.cols}, quantized, pair.drift);
}

std::vector<float> mean_drift(const InputPair& pair) {
  const double scale = pair.quantized.count > 0 ? 1.0 / static_cast<double>(pair.quantized.count) : 0.0;
  std::vector<float> result(pair.drift.size());
  std::ranges::transform(pair.drift, result.begin(), [&](double sum) { return static_cast<float>(sum * scale); });
  return result;
}

void follow_inputs(MatrixView<float> weight, MatrixView<const float> drift, const ErrorFactor& factor, double mean,
                   const MoveLimit& limit) {
  const int64_t k = weight.cols;
  ensure(drift.rows == k && drift.cols == k && factor.width() == k, "follow_inputs: other shapes");
  const auto order = factor.order();
  parallel_for(weight.rows, task_rows, [&](int64_t begin, int64_t end) {
    const int64_t rows = end - begin;
    std::vector<float> moved(static_cast<size_t>(rows * k)), placed(moved.size());
    const MatrixView<float> moves(moved.data(), rows, k), by_position(placed.data(), rows, k);
    kernels::gemm_nn({weight.row(begin), rows, k, weight.stride}, drift, moves);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t p = 0; p < k; ++p) by_position.row(r)[p] = moves.row(r)[order[static_cast<size_t>(p)]];
    }
    Solver(factor, mean, by_position).run();
    for (int64_t r = 0; r < rows; ++r) {
      float* const row = weight.row(begin + r);
      const std::span<const float> move(by_position.row(r), static_cast<size_t>(k));
      const float part = part_of_move(row, move, order, limit);
      for (size_t p = 0; p < move.size(); ++p) row[order[p]] += part * move[p];
    }
  });
}

}  // namespace w4q::quantize
