// What gated MLPs and gated attention do to products, on the GPU against the CPU's.
#include "kernels/elementwise/gates_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "kernels/frame/linear_fusion.h"
#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using test::floats;
using test::from_device;
using test::on_device;
using test::RandomMatrix;

/// One rounding to f16, of results below 2^-14 half of f16's least step, and some twenty roundings of fp32 on either side.
void expect_once_rounded(const std::vector<float>& found, const std::vector<float>& expected, int what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const double size = std::abs(double{expected[i]});
    EXPECT_NEAR(found[i], expected[i], size * 0x1p-11 + 0x1p-25 + 40 * 0x1p-24 * std::max(size, 1.0))
        << what << " " << i;
  }
}

class GatesCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

/// The place of a column of gates, and of its up, in a row of both.
std::pair<int64_t, int64_t> places(GateColumns columns, int64_t c, int64_t inner) {
  if (columns == GateColumns::in_turn) return {2 * c, 2 * c + 1};
  if (columns == GateColumns::halves) return {c, inner + c};
  const int64_t gate = c / gate_up_turn * (2 * gate_up_turn) + c % gate_up_turn;
  return {gate, gate + gate_up_turn};
}

TEST_F(GatesCuda, MultiplyAsOnTheCpu) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows = 7, inner = 48;
  for (int kind = 0; kind <= static_cast<int>(Activation::hard_swish); ++kind) {
    const Gating gating{.activation = static_cast<Activation>(kind), .limit = 1.5};
    for (const auto columns : {GateColumns::halves, GateColumns::in_turn, GateColumns::turns}) {
      RandomMatrix gate(rows, inner, 1);
      const RandomMatrix up(rows, inner, 2);
      for (float& value : gate.values) value *= 4;  // both ends of what is bent
      std::vector<float> both(static_cast<size_t>(rows * 2 * inner));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < inner; ++c) {
          const auto [at, beside] = places(columns, c, inner);
          both[static_cast<size_t>(r * 2 * inner + at)] = gate.row(r)[c];
          both[static_cast<size_t>(r * 2 * inner + beside)] = up.row(r)[c];
        }
      }
      gate_multiply(gating, gate, up);
      const auto products = on_device(both, stream);
      auto out = test::poisoned(static_cast<size_t>(rows * inner) * 2, stream);
      gate_multiply_cuda(gating, products.as<float>(), rows, inner, columns, out.as<__half>(), false, stream);
      expect_once_rounded(floats(from_device<uint16_t>(out, gate.values.size(), stream)), gate.values, kind);
    }
  }
}

TEST_F(GatesCuda, StayWithinTheRangeOfF16) {
  const device::Stream stream(test::gpu());
  const auto products = on_device<float>({3000, -3000, 4000, 4000}, stream);
  auto out = test::poisoned(4, stream);
  gate_multiply_cuda({.activation = Activation::linear}, products.as<float>(), 1, 2, GateColumns::halves,
                     out.as<__half>(), false, stream);
  EXPECT_EQ(floats(from_device<uint16_t>(out, 2, stream)), (std::vector<float>{65504, -65504}));
}

TEST_F(GatesCuda, QueriesAndGatesOfHeadsAreTakenApart) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows = 3, heads = 2, dim = 16, behind = 24, width = heads * dim;
  const RandomMatrix both(rows, 2 * width + behind, 3);
  const auto products = on_device(both.values, stream);
  auto qkv = test::poisoned(static_cast<size_t>(rows * (width + behind)) * 4, stream);
  auto gates = test::poisoned(static_cast<size_t>(rows * width) * 4, stream);
  split_gates_cuda({.products = products.as<float>(),
                    .rows = rows,
                    .heads = heads,
                    .head_dim = dim,
                    .behind = behind,
                    .qkv = qkv.as<float>(),
                    .gates = gates.as<float>()},
                   stream);
  std::vector<float> expected, expected_gates;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < 2 * width; ++c) {
      (c / dim % 2 == 0 ? expected : expected_gates).push_back(both.row(r)[c]);
    }
    expected.insert(expected.end(), both.row(r) + 2 * width, both.row(r) + 2 * width + behind);
  }
  EXPECT_EQ(from_device<float>(qkv, expected.size(), stream), expected);
  EXPECT_EQ(from_device<float>(gates, expected_gates.size(), stream), expected_gates);
}

TEST_F(GatesCuda, OutputsAreGatedAsOnTheCpu) {
  const device::Stream stream(test::gpu());
  RandomMatrix x(5, 33, 4);
  const RandomMatrix gate(5, 33, 5);
  x.values = test::rounded(x.values);
  auto out = on_device(test::halves(x.values), stream);
  const auto gates = on_device(gate.values, stream);
  sigmoid_multiply_cuda(out.as<__half>(), gates.as<float>(), std::ssize(x.values), false, stream);
  sigmoid_multiply(x, gate);
  expect_once_rounded(floats(from_device<uint16_t>(out, x.values.size(), stream)), x.values, -1);
}

}  // namespace
}  // namespace w4q::kernels
