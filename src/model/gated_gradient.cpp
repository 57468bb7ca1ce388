#include "model/gated_gradient.h"

#include <algorithm>

#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/gates.h"
#include "kernels/linear/linear.h"
#include "model/columns.h"

namespace w4q::model {

void GatedGradient::forward(MatrixView<const float> x) {
  const int64_t rows = x.rows, width = output_.k;
  memory_.products.resize(std::max(memory_.products.size(), inputs_.linears.size()));
  for (size_t i = 0; i < inputs_.linears.size(); ++i) {
    kernels::linear(weight_of(inputs_.linears[i]), x, memory_.products[i].matrix(rows, inputs_.linears[i].n));
  }
  const auto gates = memory_.gates.matrix(rows, width), ups = memory_.ups.matrix(rows, width);
  if (as_one()) {
    const auto both = memory_.products[0].matrix(rows, 2 * width);
    pick(both, 0, in_turn() ? 2 : 1, gates);
    pick(both, in_turn() ? 1 : width, in_turn() ? 2 : 1, ups);
  } else {
    pick(memory_.products[0].matrix(rows, width), 0, 1, gates);
    pick(memory_.products[1].matrix(rows, width), 0, 1, ups);
  }
  const auto mixed = memory_.mixed.matrix(rows, width);
  pick(gates, 0, 1, mixed);
  kernels::gate_multiply(block_.gating, mixed, ups);
}

MatrixView<float> GatedGradient::output(int64_t rows) {
  const auto result = memory_.output.matrix(rows, output_.n);
  kernels::linear(weight_of(output_), memory_.mixed.matrix(rows, output_.k), result);
  return result;
}

void GatedGradient::backward(MatrixView<const float> x, MatrixView<const float> by_output, MatrixView<float> by_x,
                             const GradientObserver& observer) {
  const int64_t rows = x.rows, width = output_.k;
  if (observer) observer(output_, memory_.mixed.matrix(rows, width), by_output);
  const auto by_mixed = memory_.by_mixed.matrix(rows, width);
  kernels::linear_gradient(weight_of(output_), by_output, by_mixed);
  memory_.by_products.resize(std::max(memory_.by_products.size(), inputs_.linears.size()));
  const auto by_product = [&](size_t i) { return memory_.by_products[i].matrix(rows, inputs_.linears[i].n); };
  const auto gates = memory_.gates.matrix(rows, width), ups = memory_.ups.matrix(rows, width);
  if (as_one()) {
    const auto by_gates = memory_.by_gates.matrix(rows, width), by_ups = memory_.by_ups.matrix(rows, width);
    kernels::gate_multiply_gradient(block_.gating, gates, ups, by_mixed, by_gates, by_ups);
    place(by_gates, by_product(0), 0, in_turn() ? 2 : 1);
    place(by_ups, by_product(0), in_turn() ? 1 : width, in_turn() ? 2 : 1);
  } else {
    kernels::gate_multiply_gradient(block_.gating, gates, ups, by_mixed, by_product(0), by_product(1));
  }
  const auto part = memory_.part.matrix(rows, by_x.cols);
  for (size_t i = 0; i < inputs_.linears.size(); ++i) {
    if (observer) observer(inputs_.linears[i], x, by_product(i));
    kernels::linear_gradient(weight_of(inputs_.linears[i]), by_product(i), i == 0 ? by_x : part);
    if (i > 0) kernels::add_rows(by_x, part);
  }
}

}  // namespace w4q::model
