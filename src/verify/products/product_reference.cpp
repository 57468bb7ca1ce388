#include "verify/products/product_reference.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/parallel.h"
#include "kernels/linear/int8_rows.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

constexpr int64_t exact_outputs = 64;

std::vector<float> cpu_product(const LinearWeight& weight, MatrixView<const float> x, bool int8) {
  std::vector<float> y(static_cast<size_t>(x.rows * weight.n));
  const MatrixView<float> view(y.data(), x.rows, weight.n);
  if (int8) {
    kernels::linear_int8(weight, x, view);
  } else {
    kernels::linear(weight, x, view);
  }
  return y;
}

std::vector<double> exact_product(const LinearWeight& weight, int64_t first, int64_t count, MatrixView<const float> x) {
  std::vector<float> decoded(static_cast<size_t>(count * weight.k));
  kernels::decode_rows(weight, first, first + count, {decoded.data(), count, weight.k});
  std::vector<double> y(static_cast<size_t>(x.rows * count));
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      const float* const w = decoded.data() + o * weight.k;
      for (int64_t r = 0; r < x.rows; ++r) {
        double sum = weight.bias.empty() ? 0 : weight.bias[static_cast<size_t>(first + o)];
        for (int64_t c = 0; c < weight.k; ++c) sum += double{w[c]} * x.row(r)[c];
        y[static_cast<size_t>(r * count + o)] = sum;
      }
    }
  });
  return y;
}

/// What a product with int8 activations multiplies.
std::vector<float> rounded_to_int8(const LinearWeight& weight, MatrixView<const float> x) {
  const auto& packed = *std::get<std::shared_ptr<const formats::PackedLinear>>(weight.matrix);
  const auto k = static_cast<size_t>(weight.k);
  const auto divisor = [&](size_t i) { return packed.input_scale.empty() ? 1.0f : packed.input_scale[i % k]; };
  std::vector<float> values(static_cast<size_t>(x.rows) * k), scales(static_cast<size_t>(x.rows));
  for (size_t i = 0; i < values.size(); ++i) values[i] = x.row(static_cast<int64_t>(i / k))[i % k] / divisor(i);
  const MatrixView<float> rows(values.data(), x.rows, weight.k);
  kernels::quantize_int8(rows, scales, rows);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i / k] * divisor(i);
  return values;
}

ProductReference reference_of(const LinearWeight& weight, MatrixView<const float> x, bool int8) {
  ProductReference result;
  result.n = weight.n;
  result.count = std::min(exact_outputs, weight.n);
  result.first = (weight.n - result.count) / 2;
  result.cpu = cpu_product(weight, x, int8);
  result.exact = exact_product(weight, result.first, result.count, x);
  if (!int8) return result;
  result.unrounded = std::move(result.exact);
  const auto rounded = rounded_to_int8(weight, x);
  result.exact = exact_product(weight, result.first, result.count, {rounded.data(), x.rows, x.cols});
  return result;
}

template <class Value>
void gate_with(std::vector<Value>& gates, const std::vector<Value>& ups) {
  for (size_t i = 0; i < gates.size(); ++i) gates[i] = gates[i] / (1 + std::exp(-gates[i])) * ups[i];
}

/// Sums of squares of differences and of references.
struct Distance {
  double error = 0, signal = 0;
  void add(double got, double expected) {
    error += (got - expected) * (got - expected);
    signal += expected * expected;
  }
  double relative() const { return signal > 0 ? std::sqrt(error / signal) : std::sqrt(error); }
};

}  // namespace

std::vector<ProductReference> make_references(std::span<const LinearWeight* const> weights, Use use,
                                              MatrixView<const float> x, bool int8) {
  std::vector<ProductReference> references;
  int64_t column = 0;
  for (const auto* weight : weights) {
    references.push_back(reference_of(*weight, x, int8));
    references.back().column = column;
    column += weight->n;
  }
  if (use != Use::gated) return references;
  gate_with(references[0].cpu, references[1].cpu);
  gate_with(references[0].exact, references[1].exact);
  gate_with(references[0].unrounded, references[1].unrounded);
  references.pop_back();
  return references;
}

Distances distances(const ProductReference& reference, std::span<const int64_t> at, const float* found,
                    int64_t stride) {
  Distance cpu, exact, unrounded;
  for (size_t i = 0; i < at.size(); ++i) {
    const float* const row = found + at[i] * stride + reference.column;
    for (int64_t o = 0; o < reference.n; ++o)
      cpu.add(row[o], reference.cpu[i * static_cast<size_t>(reference.n) + static_cast<size_t>(o)]);
    for (int64_t o = 0; o < reference.count; ++o) {
      const size_t place = i * static_cast<size_t>(reference.count) + static_cast<size_t>(o);
      exact.add(row[reference.first + o], reference.exact[place]);
      if (!reference.unrounded.empty()) unrounded.add(row[reference.first + o], reference.unrounded[place]);
    }
  }
  return {cpu.relative(), exact.relative(), unrounded.relative()};
}

}  // namespace w4q::verify
