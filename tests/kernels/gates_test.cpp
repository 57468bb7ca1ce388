#include "kernels/elementwise/gates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void expect_gate(const Gating& gating, const std::function<double(double gate, double up)>& definition) {
  RandomMatrix gate(7, 45, 1), up(7, 45, 2);
  for (float& value : gate.values) value *= 4;
  const RandomMatrix before = gate;
  gate_multiply(gating, gate, up);
  for (size_t i = 0; i < gate.values.size(); ++i) {
    const double expected = definition(before.values[i], up.values[i]);
    // Some ten fp32 operations.
    EXPECT_NEAR(gate.values[i], expected, 2e-6 * std::max(1.0, std::abs(expected))) << before.values[i];
  }
}

TEST(Gates, FollowTheirDefinitions) {
  expect_gate({.activation = Activation::silu}, [](double g, double u) { return g * sigmoid(g) * u; });
  expect_gate({.activation = Activation::gelu_tanh}, [](double g, double u) {
    return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
  });
  expect_gate({.activation = Activation::gelu},
              [](double g, double u) { return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u; });
  expect_gate({.activation = Activation::clamped_swiglu, .limit = 1.5}, [](double g, double u) {
    const double clamped = std::min(g, 1.5);
    return (std::clamp(u, -1.5, 1.5) + 1) * clamped * sigmoid(1.702 * clamped);
  });
  expect_gate({.activation = Activation::clamped_swiglu, .limit = 1.5, .slope = 1.2}, [](double g, double u) {
    const double clamped = std::min(g, 1.5);
    return (std::clamp(u, -1.5, 1.5) + 1) * clamped * sigmoid(1.2 * clamped);
  });
}

struct PlainActivation {
  Activation activation;
  double (*at)(double);
};
constexpr PlainActivation plain_activations[] = {
    {Activation::relu, [](double x) { return std::max(x, 0.0); }},
    {Activation::relu_squared, [](double x) { return std::max(x, 0.0) * std::max(x, 0.0); }},
    {Activation::relu6, [](double x) { return std::clamp(x, 0.0, 6.0); }},
    {Activation::leaky_relu, [](double x) { return x > 0 ? x : 0.01 * x; }},
    {Activation::sigmoid, sigmoid},
    {Activation::tanh, [](double x) { return std::tanh(x); }},
    {Activation::quick_gelu, [](double x) { return x * sigmoid(1.702 * x); }},
    {Activation::linear, [](double x) { return x; }},
    {Activation::mish, [](double x) { return x * std::tanh(std::log1p(std::exp(x))); }},
    {Activation::hard_swish, [](double x) { return x * std::clamp(x + 3, 0.0, 6.0) / 6; }},
};

TEST(Gates, OfPlainActivationsFollowTheirDefinitions) {
  for (const auto& [activation, at] : plain_activations) {
    expect_gate({.activation = activation}, [at = at](double g, double u) { return at(g) * u; });
  }
}

TEST(Gates, OfOneMatrix) {
  RandomMatrix x(3, 9, 1), gate(3, 9, 2);
  const RandomMatrix before = x;
  sigmoid_multiply(x, gate);
  for (size_t i = 0; i < x.values.size(); ++i) {
    EXPECT_NEAR(x.values[i], before.values[i] * sigmoid(gate.values[i]), 2e-6);
  }
  x = before;
  silu(x);
  for (size_t i = 0; i < x.values.size(); ++i) {
    EXPECT_NEAR(x.values[i], before.values[i] * sigmoid(before.values[i]), 2e-6);
  }
}

/// The slope of f at x, in fp64.
double slope_of(const std::function<double(double)>& f, double x) { return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5; }

void expect_gate_gradient(const Gating& gating, const std::function<double(double gate, double up)>& definition) {
  RandomMatrix gate(7, 45, 1), by(7, 45, 3), by_gate(7, 45, 4), by_up(7, 45, 5);
  const RandomMatrix up(7, 45, 2);
  for (float& value : gate.values) value *= 2;
  gate_multiply_gradient(gating, gate, up, by, by_gate, by_up);
  for (size_t i = 0; i < gate.values.size(); ++i) {
    const double g = gate.values[i], u = up.values[i];
    // Some ten fp32 operations, and differences of 1e-5 in fp64.
    EXPECT_NEAR(by_gate.values[i], by.values[i] * slope_of([&](double x) { return definition(x, u); }, g), 1e-5) << g;
    EXPECT_NEAR(by_up.values[i], by.values[i] * slope_of([&](double x) { return definition(g, x); }, u), 1e-5) << u;
  }
}

TEST(Gates, HaveTheirSlopesAsGradients) {
  expect_gate_gradient({.activation = Activation::silu}, [](double g, double u) { return g * sigmoid(g) * u; });
  expect_gate_gradient({.activation = Activation::gelu_tanh}, [](double g, double u) {
    return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
  });
  expect_gate_gradient({.activation = Activation::gelu},
                       [](double g, double u) { return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u; });
  expect_gate_gradient({.activation = Activation::clamped_swiglu, .limit = 1.5}, [](double g, double u) {
    const double clamped = std::min(g, 1.5);
    return (std::clamp(u, -1.5, 1.5) + 1) * clamped * sigmoid(1.702 * clamped);
  });
  expect_gate_gradient({.activation = Activation::clamped_swiglu, .limit = 1.5, .slope = 1.2}, [](double g, double u) {
    const double clamped = std::min(g, 1.5);
    return (std::clamp(u, -1.5, 1.5) + 1) * clamped * sigmoid(1.2 * clamped);
  });
}

TEST(Gates, OfPlainActivationsHaveTheirSlopesAsGradients) {
  for (const auto& [activation, at] : plain_activations) {
    expect_gate_gradient({.activation = activation}, [at = at](double g, double u) { return at(g) * u; });
  }
}

TEST(Gates, OfOutputsHaveTheirSlopesAsGradients) {
  const RandomMatrix x(5, 33, 1), gate(5, 33, 2), by(5, 33, 3);
  RandomMatrix by_x = by, by_gate(5, 33, 4);
  sigmoid_multiply_gradient(x, gate, by_x, by_gate);
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double g = gate.values[i];
    EXPECT_NEAR(by_x.values[i], by.values[i] * sigmoid(g), 1e-6);
    EXPECT_NEAR(by_gate.values[i], by.values[i] * x.values[i] * slope_of(sigmoid, g), 1e-6);
  }
}

}  // namespace
}  // namespace w4q::kernels
