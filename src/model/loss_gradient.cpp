#include "model/loss_gradient.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "model/columns.h"
#include "model/scratch.h"

namespace w4q::model {
namespace {

/// Rows whose logits exist together.
constexpr int64_t logit_rows = 256;

/// What a head's products become: scaled and capped, and by how much that follows the product.
struct Finish {
  explicit Finish(const ModelConfig& config) : scale(config.logit_scale), cap(config.logit_cap) {}

  double operator()(float x) const {
    const double scaled = double{x} * scale;
    return cap > 0 ? cap * std::tanh(scaled / cap) : scaled;
  }
  double slope(double logit) const { return cap > 0 ? scale * (1 - logit / cap * (logit / cap)) : scale; }
  /// log Σ exp of a row.
  double log_sum(const float* products, int64_t count) const {
    double largest = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; ++c) largest = std::max(largest, (*this)(products[c]));
    for (int64_t c = 0; c < count; ++c) sum += std::exp((*this)(products[c]) - largest);
    return largest + std::log(sum);
  }

  double scale, cap;
};

/// Turns a head's products of a row into the gradient of −log p(next) by them, which is returned.
double cross_entropy(const Finish& finish, float* products, int64_t count, int64_t next) {
  const double log_sum = finish.log_sum(products, count), loss = log_sum - finish(products[next]);
  for (int64_t c = 0; c < count; ++c) {
    const double logit = finish(products[c]);
    products[c] = static_cast<float>((std::exp(logit - log_sum) - (c == next ? 1.0 : 0.0)) * finish.slope(logit));
  }
  return loss;
}

/// The same of KL(expected ‖ this).
double divergence_of(const Finish& expected_finish, const float* expected, const Finish& finish, float* products,
                     int64_t count) {
  const double expected_sum = expected_finish.log_sum(expected, count), log_sum = finish.log_sum(products, count);
  double loss = 0;
  for (int64_t c = 0; c < count; ++c) {
    const double wanted = expected_finish(expected[c]) - expected_sum, logit = finish(products[c]);
    const double p = std::exp(wanted);
    loss += p * (wanted - (logit - log_sum));
    products[c] = static_cast<float>((std::exp(logit - log_sum) - p) * finish.slope(logit));
  }
  return loss;
}

/// Products of the head with normed rows, some of them at a time.
MatrixView<float> head_products(const LossGradient& of, MatrixView<const float> rows, MatrixView<float> normed,
                                Floats& memory) {
  kernels::rms_norm(rows, of.final_norm, static_cast<float>(of.config.rms_norm_eps), normed);
  const auto products = memory.matrix(rows.rows, of.head.n);
  kernels::linear(of.head, normed, products);
  return products;
}

/// `turn(first row, products, losses)` turns products into gradients by them; x becomes the gradient by x where that is
/// wanted. Returns the sum of the losses.
template <class Turn>
double go_back(const LossGradient& of, MatrixView<float> x, bool wanted, const NormObserver& norm, const Turn& turn) {
  ensure(x.cols == of.head.k && x.cols == std::ssize(of.final_norm), "LossGradient: shapes differ");
  Floats hidden, memory;
  std::vector<double> losses(static_cast<size_t>(x.rows));
  for (int64_t first = 0; first < x.rows; first += logit_rows) {
    const MatrixView<float> rows(x.row(first), std::min(logit_rows, x.rows - first), x.cols, x.stride);
    const auto normed = hidden.matrix(rows.rows, x.cols);
    const auto products = head_products(of, rows, normed, memory);
    turn(first, products, std::span(losses).subspan(static_cast<size_t>(first), static_cast<size_t>(rows.rows)));
    if (!wanted) continue;
    kernels::linear_gradient(of.head, products, normed);
    if (norm) norm(final_norm_plan(of.config), rows, normed);
    kernels::rms_norm_gradient(rows, of.final_norm, static_cast<float>(of.config.rms_norm_eps), normed);
    pick(normed, 0, 1, rows);
  }
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum;
}

double go_back_from(const LossGradient& teacher, MatrixView<const float> expected, const LossGradient& of,
                    MatrixView<float> x, bool wanted, const NormObserver& norm) {
  ensure(expected.rows == x.rows && expected.cols == teacher.head.k && teacher.head.n == of.head.n,
         "LossGradient: shapes differ from the teacher's");
  const Finish expected_finish(teacher.config), finish(of.config);
  Floats hidden, memory;
  return go_back(of, x, wanted, norm, [&](int64_t first, MatrixView<float> products, std::span<double> losses) {
    const MatrixView<const float> rows(expected.row(first), products.rows, expected.cols, expected.stride);
    const auto wanted_products = head_products(teacher, rows, hidden.matrix(rows.rows, rows.cols), memory);
    parallel_for(products.rows, 1, [&](int64_t row, int64_t) {
      losses[static_cast<size_t>(row)] =
          divergence_of(expected_finish, wanted_products.row(row), finish, products.row(row), products.cols);
    });
  });
}

}  // namespace

double LossGradient::run(std::span<const int32_t> ids, MatrixView<float> x) const {
  ensure(x.rows == std::ssize(ids), "LossGradient: shapes differ");
  const Finish finish(config);
  return go_back(*this, x, true, {}, [&](int64_t first, MatrixView<float> products, std::span<double> losses) {
    parallel_for(products.rows, 1, [&](int64_t row, int64_t) {
      const auto at = static_cast<size_t>(first + row);
      if (at + 1 == ids.size()) return std::fill_n(products.row(row), products.cols, 0.0f), void();
      losses[static_cast<size_t>(row)] = cross_entropy(finish, products.row(row), products.cols, ids[at + 1]);
    });
  });
}

double LossGradient::run(const LossGradient& teacher, MatrixView<const float> expected, MatrixView<float> x,
                         const NormObserver& norm) const {
  return go_back_from(teacher, expected, *this, x, true, norm);
}

double LossGradient::divergence(const LossGradient& teacher, MatrixView<const float> expected,
                                MatrixView<const float> x) const {
  Floats memory;
  const auto copy = memory.matrix(x.rows, x.cols);
  pick(x, 0, 1, copy);
  return go_back_from(teacher, expected, *this, copy, false, {});
}

}  // namespace w4q::model
