#include "model/mixture_gradient.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/linear.h"
#include "model/activations.h"
#include "model/columns.h"

namespace w4q::model {
namespace {

double inner(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t c = 0; c < count; ++c) sum += double{a[c]} * double{b[c]};
  return sum;
}

void clear(MatrixView<float> x) { std::fill_n(x.data, x.rows * x.cols, 0.0f); }

}  // namespace

std::span<const float> MixtureGradient::norm(NormRole role) const {
  const auto* planned = block_.norm(role);
  return planned == nullptr ? std::span<const float>{} : weights_.norms[planned->position];
}

std::span<const float> MixtureGradient::vector(VectorRole role) const {
  const auto* planned = block_.vector(role);
  return planned == nullptr ? std::span<const float>{} : weights_.vectors[planned->position];
}

MatrixView<const float> MixtureGradient::routed_input(MatrixView<const float> x, MatrixView<const float> input) {
  const auto weight = vector(VectorRole::router_scale);
  if (weight.empty()) return input;
  const auto result = memory_.routed_input.matrix(x.rows, x.cols);
  kernels::rms_norm(x, weight, eps_, result);
  scale_rows(result, 1 / std::sqrt(static_cast<double>(x.cols)));
  return result;
}

MatrixView<const float> MixtureGradient::expert_input(MatrixView<const float> x, MatrixView<const float> input) {
  const auto weight = norm(NormRole::expert_input);
  if (weight.empty()) return input;
  const auto result = memory_.expert_input.matrix(x.rows, x.cols);
  kernels::rms_norm(x, weight, eps_, result);
  return result;
}

GatedGradient MixtureGradient::expert(size_t index) {
  const auto& groups = block_.groups;
  return {weights_, block_, groups[1 + 2 * index], groups[2 + 2 * index].linears.front(), memory_.mlp};
}

GatedGradient MixtureGradient::shared() {
  const auto& groups = block_.groups;
  return {weights_, block_, groups[groups.size() - 2], groups.back().linears.front(), memory_.mlp};
}

std::vector<std::vector<size_t>> MixtureGradient::takers() const {
  std::vector<std::vector<size_t>> result(static_cast<size_t>(block_.mixture.experts));
  const auto& experts = memory_.routing.experts;
  for (size_t i = 0; i < experts.size(); ++i) result[static_cast<size_t>(experts[i])].push_back(i);
  return result;
}

MatrixView<float> MixtureGradient::rows_of(const std::vector<size_t>& entries, MatrixView<const float> from,
                                           Floats& to) const {
  const auto result = to.matrix(std::ssize(entries), from.cols);
  for (int64_t r = 0; r < result.rows; ++r) {
    std::copy_n(from.row(row_of(entries[static_cast<size_t>(r)])), from.cols, result.row(r));
  }
  return result;
}

MatrixView<float> MixtureGradient::forward(MatrixView<const float> x, MatrixView<const float> input) {
  const auto routed = routed_input(x, input), from = expert_input(x, input);
  const auto logits = memory_.logits.matrix(x.rows, block_.mixture.experts);
  kernels::linear(weight_of(router().linears[0]), routed, logits);
  memory_.routing = route(block_.mixture, logits, vector(VectorRole::correction), vector(VectorRole::expert_scale));
  const auto sum = memory_.sum.matrix(x.rows, x.cols), output = memory_.output.matrix(x.rows, x.cols);
  clear(sum);
  const auto takers = this->takers();
  for (size_t index = 0; index < takers.size(); ++index) {
    if (takers[index].empty()) continue;
    const auto rows = rows_of(takers[index], from, memory_.rows);
    auto mlp = expert(index);
    mlp.forward(rows);
    const auto product = mlp.output(rows.rows);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const size_t entry = takers[index][static_cast<size_t>(r)];
      for (int64_t c = 0; c < sum.cols; ++c) {
        sum.row(row_of(entry))[c] += memory_.routing.shares[entry] * product.row(r)[c];
      }
    }
  }
  pick(sum, 0, 1, output);
  if (const auto weight = norm(NormRole::expert_output); !weight.empty()) {
    kernels::rms_norm(sum, weight, eps_, output);
  }
  if (!has_shared()) return output;
  auto mlp = shared();
  mlp.forward(input);
  const auto product = mlp.output(x.rows);
  if (const auto weight = norm(NormRole::dense_output); !weight.empty()) {
    kernels::rms_norm(product, weight, eps_, product);
  }
  if (shares()) {
    const auto gates = memory_.shared_logits.matrix(x.rows, 1);
    kernels::linear(weight_of(router().linears[1]), routed, gates);
    for (int64_t r = 0; r < x.rows; ++r) scale_rows({product.row(r), 1, product.cols}, logistic(gates.row(r)[0]));
  }
  kernels::add_rows(output, product);
  return output;
}

void MixtureGradient::experts_back(MatrixView<const float> from, MatrixView<const float> by_sum,
                                   std::vector<float>& by_shares, MatrixView<float> by_input,
                                   const GradientObserver& observer) {
  const auto takers = this->takers();
  for (size_t index = 0; index < takers.size(); ++index) {
    const auto& entries = takers[index];
    if (entries.empty()) continue;
    const auto rows = rows_of(entries, from, memory_.rows), by = rows_of(entries, by_sum, memory_.row_gradients);
    auto mlp = expert(index);
    mlp.forward(rows);
    const auto product = mlp.output(rows.rows);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const size_t entry = entries[static_cast<size_t>(r)];
      by_shares[entry] = static_cast<float>(inner(by.row(r), product.row(r), by.cols));
      scale_rows({by.row(r), 1, by.cols}, double{memory_.routing.shares[entry]});
    }
    const auto by_rows = memory_.by_rows.matrix(rows.rows, rows.cols);
    mlp.backward(rows, by, by_rows, observer);
    for (int64_t r = 0; r < rows.rows; ++r) {
      float* const to = by_input.row(row_of(entries[static_cast<size_t>(r)]));
      for (int64_t c = 0; c < rows.cols; ++c) to[c] += by_rows.row(r)[c];
    }
  }
}

void MixtureGradient::shared_back(MatrixView<const float> input, MatrixView<const float> by_output,
                                  MatrixView<float> by_input, const GradientObserver& observer) {
  auto mlp = shared();
  mlp.forward(input);
  const auto product = mlp.output(input.rows);
  const auto by = memory_.by_shared.matrix(input.rows, by_output.cols);
  pick(by_output, 0, 1, by);
  const auto normed = memory_.part.matrix(product.rows, product.cols);
  pick(product, 0, 1, normed);
  const auto weight = norm(NormRole::dense_output);
  if (!weight.empty()) kernels::rms_norm(product, weight, eps_, normed);
  if (shares()) {
    const auto gates = memory_.shared_logits.matrix(input.rows, 1);
    const auto by_gates = memory_.by_shared_logits.matrix(input.rows, 1);
    for (int64_t r = 0; r < input.rows; ++r) {
      const float share = logistic(gates.row(r)[0]);
      by_gates.row(r)[0] =
          static_cast<float>(inner(by.row(r), normed.row(r), by.cols) * double{share} * (1.0 - double{share}));
      scale_rows({by.row(r), 1, by.cols}, double{share});
    }
  }
  if (!weight.empty()) kernels::rms_norm_gradient(product, weight, eps_, by);
  const auto by_rows = memory_.by_rows.matrix(input.rows, input.cols);
  mlp.backward(input, by, by_rows, observer);
  kernels::add_rows(by_input, by_rows);
}

void MixtureGradient::backward(MatrixView<const float> x, MatrixView<const float> input,
                               MatrixView<const float> by_output, MatrixView<float> by_x, MatrixView<float> by_input,
                               const GradientObserver& observer) {
  const auto routed = routed_input(x, input), from = expert_input(x, input);
  clear(by_x);
  clear(by_input);
  const auto by_sum = memory_.by_sum.matrix(x.rows, x.cols);
  pick(by_output, 0, 1, by_sum);
  if (const auto weight = norm(NormRole::expert_output); !weight.empty()) {
    kernels::rms_norm_gradient(memory_.sum.matrix(x.rows, x.cols), weight, eps_, by_sum);
  }
  std::vector<float> by_shares(memory_.routing.shares.size());
  const auto by_from = memory_.by_expert_input.matrix(x.rows, x.cols);
  clear(by_from);
  if (has_shared()) shared_back(input, by_output, by_input, observer);
  experts_back(from, by_sum, by_shares, by_from, observer);
  const auto logits = memory_.logits.matrix(x.rows, block_.mixture.experts);
  const auto by_logits = memory_.by_logits.matrix(x.rows, logits.cols);
  route_gradient(block_.mixture, logits, memory_.routing, vector(VectorRole::expert_scale), by_shares, by_logits);
  const auto by_routed = memory_.by_routed.matrix(x.rows, x.cols), part = memory_.part.matrix(x.rows, x.cols);
  if (observer) observer(router().linears[0], routed, by_logits);
  kernels::linear_gradient(weight_of(router().linears[0]), by_logits, by_routed);
  if (has_shared() && shares()) {
    const auto by_gates = memory_.by_shared_logits.matrix(x.rows, 1);
    if (observer) observer(router().linears[1], routed, by_gates);
    kernels::linear_gradient(weight_of(router().linears[1]), by_gates, part);
    kernels::add_rows(by_routed, part);
  }
  const auto scale = vector(VectorRole::router_scale), expert_norm = norm(NormRole::expert_input);
  if (!scale.empty()) {
    scale_rows(by_routed, 1 / std::sqrt(static_cast<double>(x.cols)));
    kernels::rms_norm_gradient(x, scale, eps_, by_routed);
  }
  kernels::add_rows(scale.empty() ? by_input : by_x, by_routed);
  if (!expert_norm.empty()) kernels::rms_norm_gradient(x, expert_norm, eps_, by_from);
  kernels::add_rows(expert_norm.empty() ? by_input : by_x, by_from);
}

}  // namespace w4q::model
