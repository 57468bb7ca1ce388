#include "kernels/delta_net/delta_net.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/parallel.h"
#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

constexpr DeltaShape shape{.key_heads = 2, .value_heads = 6, .key_dim = 8, .value_dim = 12, .taps = 4};
constexpr int64_t length = 30;

struct Inputs {
  RandomMatrix mixed{length, shape.channels(), 1}, beta{length, shape.value_heads, 2},
      decay{length, shape.value_heads, 3};
  Inputs() {
    for (float& value : beta.values) value = 1 / (1 + std::exp(-value));
    for (float& value : decay.values) value = -std::abs(value) / 4;
  }
};

/// Runs the sequence in chunks.
std::vector<float> run(const Inputs& inputs, const std::vector<int64_t>& chunks) {
  std::vector<float> state(static_cast<size_t>(shape.state_size()), 0.0f);
  RandomMatrix out(length, shape.values(), 9);
  int64_t first = 0;
  for (const int64_t rows : chunks) {
    const auto part = [&](const RandomMatrix& m) { return MatrixView<const float>(m.row(first), rows, m.cols); };
    delta_rule(shape, part(inputs.mixed), part(inputs.beta), part(inputs.decay), state.data(),
               {out.view().row(first), rows, out.cols});
    first += rows;
  }
  return out.values;
}

/// The definition in fp64.
std::vector<double> reference(const Inputs& inputs) {
  std::vector<double> out;
  std::vector<double> state(static_cast<size_t>(shape.state_size()), 0.0);
  const auto normed = [](const float* x, double factor) {
    double sum = 1e-6;
    for (int64_t i = 0; i < shape.key_dim; ++i) sum += double{x[i]} * double{x[i]};
    std::vector<double> y;
    for (int64_t i = 0; i < shape.key_dim; ++i) y.push_back(double{x[i]} / std::sqrt(sum) * factor);
    return y;
  };
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t h = 0; h < shape.value_heads; ++h) {
      const float* row = inputs.mixed.row(t);
      const int64_t head = h / 3 * shape.key_dim;
      const auto q = normed(row + head, 1 / std::sqrt(double{shape.key_dim}));
      const auto k = normed(row + shape.keys() + head, 1);
      const float* v = row + 2 * shape.keys() + h * shape.value_dim;
      double* s = state.data() + h * shape.key_dim * shape.value_dim;
      for (int64_t i = 0; i < shape.key_dim * shape.value_dim; ++i) s[i] *= std::exp(double{inputs.decay.row(t)[h]});
      for (int64_t j = 0; j < shape.value_dim; ++j) {
        double seen = 0, read = 0;
        for (int64_t i = 0; i < shape.key_dim; ++i) seen += s[i * shape.value_dim + j] * k[static_cast<size_t>(i)];
        const double step = (double{v[j]} - seen) * double{inputs.beta.row(t)[h]};
        for (int64_t i = 0; i < shape.key_dim; ++i) {
          s[i * shape.value_dim + j] += k[static_cast<size_t>(i)] * step;
          read += s[i * shape.value_dim + j] * q[static_cast<size_t>(i)];
        }
        out.push_back(read);
      }
    }
  }
  return out;
}

TEST(DeltaNet, FollowsItsDefinition) {
  const Inputs inputs;
  const auto found = run(inputs, {length});
  const auto expected = reference(inputs);
  ASSERT_EQ(found.size(), expected.size());
  // Some hundred operations with values of a few units in fp32: 2e-6 was measured.
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << i;
}

TEST(DeltaNet, IsTheSameInAnyChunksAndThreads) {
  const Inputs inputs;
  const auto whole = run(inputs, {length});
  EXPECT_EQ(run(inputs, {1, 2, 3, 20, 4}), whole);
  EXPECT_EQ(run(inputs, std::vector<int64_t>(length, 1)), whole);
  set_threads(1);
  EXPECT_EQ(run(inputs, {length}), whole);
  set_threads(0);
}

/// Nothing is forgotten and all is learned: what was stored under a key is read back.
TEST(DeltaNet, ReadsBackWhatItLearned) {
  constexpr DeltaShape one{.key_heads = 1, .value_heads = 1, .key_dim = 4, .value_dim = 3, .taps = 1};
  std::vector<float> state(static_cast<size_t>(one.state_size()), 0.0f), out(3);
  const std::vector<float> row = {2, 0, 0, 0, 5, 0, 0, 0, 0.5f, -1, 3};
  const float beta = 1, decay = 0;
  delta_rule(one, {row.data(), 1, 11}, {&beta, 1, 1}, {&decay, 1, 1}, state.data(), {out.data(), 1, 3});
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(out[i], row[8 + i] / 2, 1e-5);  // the query's 1/√key_dim
}

TEST(DeltaNet, ConvolutionsSeeThePast) {
  RandomMatrix x(length, shape.channels(), 4), weight(shape.channels(), shape.taps, 5);
  std::vector<double> expected, expected_gelu;
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t c = 0; c < x.cols; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < shape.taps; ++i) {
        const int64_t from = t - shape.taps + 1 + i;
        if (from >= 0) sum += double{weight.row(c)[i]} * double{x.row(from)[c]};
      }
      expected.push_back(sum / (1 + std::exp(-sum)));
      expected_gelu.push_back(0.5 * sum * (1 + std::erf(sum / std::sqrt(2.0))));
    }
  }
  const auto run_chunks = [&](const std::vector<int64_t>& chunks, Activation activation = Activation::silu) {
    RandomMatrix work = x;
    std::vector<float> history(static_cast<size_t>(shape.history_size()), 0.0f);
    int64_t first = 0;
    for (const int64_t rows : chunks) {
      causal_convolution(shape, weight.values, history.data(), {work.view().row(first), rows, work.cols}, activation);
      first += rows;
    }
    return work.values;
  };
  const auto whole = run_chunks({length});
  for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(whole[i], expected[i], 1e-5);
  EXPECT_EQ(run_chunks({1, 1, 5, 23}), whole);
  const auto gelu = run_chunks({length}, Activation::gelu);
  for (size_t i = 0; i < gelu.size(); ++i)
    ASSERT_NEAR(gelu[i], expected_gelu[i], 1e-5);  // as of silu: ten fp32 operations
}

}  // namespace
}  // namespace w4q::kernels
