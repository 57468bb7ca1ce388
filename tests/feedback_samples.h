// A linear layer with correlated inputs, rounded with and without error feedback.
#pragma once

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "formats/rotation.h"
#include "formats/scheme_registry.h"
#include "kbit_samples.h"
#include "kernels/random_matrix.h"
#include "quantize/awq.h"
#include "quantize/feedback.h"
#include "quantize/rounding.h"
#include "quantize/statistics.h"

namespace w4q::test {

using formats::Scheme;
using quantize::CalibratedInput;
using quantize::ErrorFactor;
using quantize::QuantizeOptions;
using quantize::QuantizeResult;

/// The Gram matrix of inputs in which neighbours are alike and some channels loud.
inline std::vector<float> sample_gram(int64_t k, int64_t rows, uint64_t seed = 3) {
  RandomMatrix inputs(rows, k, seed);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = inputs.view().row(r);
    for (int64_t c = 1; c < k; ++c) row[c] = 0.8f * row[c - 1] + 0.6f * row[c];
    for (int64_t c = 5; c < k; c += 23) row[c] *= 4;
  }
  auto statistics = quantize::make_statistics(k, true);
  quantize::add_rows(statistics, inputs, "x");
  return quantize::mean_gram(statistics);
}

struct Layer {
  Layer(int64_t n_, int64_t k_, int64_t rows = 1000) : n(n_), k(k_), weight(n, k, 1), gram(sample_gram(k, rows)) {}

  MatrixView<const float> gram_view() const { return {gram.data(), k, k}; }
  TensorView view() const { return {"w", DType::f32, {n, k}, bytes_of(weight.values)}; }
  double error(const QuantizeResult& result) const {
    auto difference = decode(result.weight);
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= weight.values[i];
    return quantize::output_error({difference.data(), n, k}, gram_view());
  }
  QuantizeResult plain(const Scheme& scheme, const QuantizeOptions& options = {}) const {
    return quantize::rounding_quantizer(scheme).run(view(), scheme, options);
  }
  QuantizeResult fed_back(const Scheme& scheme, QuantizeOptions options = {}, double damping = 0.01) const {
    const ErrorFactor factor(gram_view(), quantize::feedback_block(scheme, k), damping, "w");
    std::vector<float> squares;
    for (int64_t c = 0; c < k; ++c) squares.push_back(gram_view().row(c)[c]);
    const CalibratedInput input{squares, &factor, gram_view()};
    options.input = &input;
    return plain(scheme, options);
  }
  /// With these options feedback leaves less error than without them.
  void expect_gain(std::string_view name, const QuantizeOptions& options) const {
    const Scheme scheme = formats::parse_scheme(name);
    const auto result = fed_back(scheme, options);
    EXPECT_NO_THROW(formats::scheme_row(scheme.family).validate(result.weight, "w"));
    EXPECT_LT(error(result), error(fed_back(scheme))) << name;
  }

  int64_t n, k;
  RandomMatrix weight;
  std::vector<float> gram;
};

/// Those of every family that both feedback on two sides and sweeps serve.
inline std::vector<formats::Scheme> fed_back_schemes() {
  using formats::SchemeFamily;
  std::vector<formats::Scheme> result;
  for (const auto family :
       {SchemeFamily::kbit, SchemeFamily::integer, SchemeFamily::rotated, SchemeFamily::small_float}) {
    for (const auto& scheme : formats::scheme_row(family).schemes()) {
      if (!scheme.act_order) result.push_back(scheme);
    }
  }
  return result;
}

/// The same in the basis of rotated inputs; `rotation` must outlive it.
inline quantize::Rounding in_basis(quantize::Rounding rounding, const formats::InputRotation& rotation) {
  rounding.round = [round = rounding.round, &rotation](MatrixView<float> rows) {
    const auto row = [&](int64_t r) { return std::span(rows.row(r), static_cast<size_t>(rows.cols)); };
    for (int64_t r = 0; r < rows.rows; ++r) rotation.rotate(row(r));
    round(rows);
    for (int64_t r = 0; r < rows.rows; ++r) rotation.restore(row(r));
  };
  return rounding;
}

inline QuantizeOptions searching() {
  QuantizeOptions options;
  options.steps = quantize::parse_steps("lloyd+search");
  return options;
}

}  // namespace w4q::test
