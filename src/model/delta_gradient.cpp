#include "model/delta_gradient.h"

#include <algorithm>
#include <cmath>

#include "kernels/delta_net/delta_net_gradient.h"
#include "kernels/elementwise/elementwise.h"

namespace w4q::model {
std::span<const float> DeltaGradient::vector(VectorRole role) const {
  return weights_.vectors[block_.vector(role)->position];
}

void DeltaGradient::forward(std::vector<Floats>& products, MatrixView<float> mixed) {
  const DeltaProducts own{memory_.raw.matrix(rows_, shape_.channels()), of_values(memory_.gates),
                          of_heads(memory_.raw_betas), of_heads(memory_.raw_decays)};
  if (as_two()) {
    part_delta_heads(shape_, product(products, 0), product(products, 1), own);
  } else {
    const MatrixView<float> to[] = {own.mixed, own.gates, own.betas, own.decays};
    for (size_t i = 0; i < std::size(to); ++i) pick(product(products, i), 0, 1, to[i]);
  }
  const auto convolved = memory_.convolved.matrix(rows_, shape_.channels());
  pick(own.mixed, 0, 1, convolved);
  const auto history = memory_.history.matrix(1, shape_.history_size());
  const auto state = memory_.state.matrix(1, shape_.state_size());
  std::fill_n(history.data, history.cols, 0.0f);
  std::fill_n(state.data, state.cols, 0.0f);
  kernels::causal_convolution(shape_, vector(VectorRole::convolution), history.data, convolved,
                              block_.gating.activation);
  const auto betas = of_heads(memory_.betas), decays = of_heads(memory_.decays);
  pick(own.betas, 0, 1, betas);
  pick(own.decays, 0, 1, decays);
  activate_delta(vector(VectorRole::decay), vector(VectorRole::step_bias), betas, decays);
  const auto out = of_values(memory_.out);
  kernels::delta_rule(shape_, convolved, betas, decays, state.data, out);
  pick(out, 0, 1, mixed);
  kernels::rms_norm_heads(mixed, norm_weight(), eps_);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < mixed.cols; ++c) {
      const float gate = own.gates.row(r)[c];
      mixed.row(r)[c] *= gate * logistic(gate);
    }
  }
}

void DeltaGradient::backward(MatrixView<const float> gradient, std::vector<Floats>& by_products,
                             const NormObserver& norms) {
  const auto out = of_values(memory_.out), gates = of_values(memory_.gates);
  const auto by_out = of_values(memory_.by_out);
  const DeltaProducts by{memory_.by_mixed.matrix(rows_, shape_.channels()), of_values(memory_.by_gates),
                         of_heads(memory_.by_betas), of_heads(memory_.by_decays)};
  pick(out, 0, 1, by_out);
  kernels::rms_norm_heads(by_out, norm_weight(), eps_);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < by_out.cols; ++c) {
      const float gate = gates.row(r)[c], share = logistic(gate), normed = by_out.row(r)[c];
      by.gates.row(r)[c] = gradient.row(r)[c] * normed * share * (1.0f + gate * (1.0f - share));
      by_out.row(r)[c] = gradient.row(r)[c] * gate * share;
    }
  }
  if (norms) norms(norm(), out, by_out);
  kernels::rms_norm_gradient(out, norm_weight(), eps_, by_out);
  const auto convolved = memory_.convolved.matrix(rows_, shape_.channels());
  const auto betas = of_heads(memory_.betas), decays = of_heads(memory_.decays);
  kernels::delta_rule_gradient(shape_, convolved, betas, decays, by_out, {by.mixed, by.betas, by.decays});
  kernels::causal_convolution_gradient(shape_, vector(VectorRole::convolution),
                                       memory_.raw.matrix(rows_, shape_.channels()), by.mixed,
                                       block_.gating.activation);
  const auto raw_decays = of_heads(memory_.raw_decays);
  const auto rate = vector(VectorRole::decay), bias = vector(VectorRole::step_bias);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t h = 0; h < shape_.value_heads; ++h) {
      const auto head = static_cast<size_t>(h);
      by.betas.row(r)[h] *= betas.row(r)[h] * (1.0f - betas.row(r)[h]);
      by.decays.row(r)[h] *= -std::exp(rate[head]) * logistic(raw_decays.row(r)[h] + bias[head]);
    }
  }
  if (as_two()) return join_delta_heads(shape_, by, product(by_products, 0), product(by_products, 1));
  const MatrixView<const float> from[] = {by.mixed, by.gates, by.betas, by.decays};
  for (size_t i = 0; i < std::size(from); ++i) pick(from[i], 0, 1, product(by_products, i));
}

}  // namespace w4q::model
