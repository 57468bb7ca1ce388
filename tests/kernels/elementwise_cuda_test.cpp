// The GPU's norms, activation, embedding and one-row products against the CPU's.
#include "kernels/elementwise/elementwise_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/frame/linear_fusion.h"
#include "kernels/linear/dense_gemv_cuda.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::floats;
using test::from_device;
using test::halves;
using test::on_device;
using test::RandomMatrix;
using test::rounded;

class ElementwiseCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

/// One rounding to f16 of a value that carries a few of fp32.
void expect_rounded(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], std::abs(expected[i]) * 0x1.2p-11 + 1e-7) << what << ", value " << i;
  }
}

TEST_F(ElementwiseCuda, NormalizesRowsOfAnyLength) {
  const device::Stream stream(test::gpu());
  for (const int64_t cols : {1, 31, 64, 4096, 5119, 16384, 20000}) {
    for (const int64_t rows : {1, 3, 70}) {
      RandomMatrix x(rows, cols, 1), weight(1, cols, 3), normed(rows, cols, 4);
      const auto x_device = on_device(x.values, stream), weight_device = on_device(weight.values, stream);
      auto out = test::poisoned(static_cast<size_t>(rows * cols * 2), stream);
      auto exact = test::poisoned(static_cast<size_t>(rows * cols * 4), stream);
      rms_norm_cuda(
          {x_device.as<float>(), weight_device.as<float>(), 1e-5f, rows, cols, out.as<__half>(), exact.as<float>()},
          stream);
      rms_norm(x, weight.values, 1e-5f, normed);
      const auto got = from_device<float>(exact, x.values.size(), stream);
      for (size_t i = 0; i < got.size(); ++i) {
        // The mean of squares is a sum of positive values: γ_cols of it, half of that for its root.
        ASSERT_NEAR(got[i], normed.values[i], (test::gamma(cols) + 4 * 0x1p-24) * std::abs(normed.values[i])) << cols;
      }
      expect_rounded(floats(from_device<uint16_t>(out, x.values.size(), stream)), got, "norm");
    }
  }
}

TEST_F(ElementwiseCuda, SiluAndEmbedding) {
  const device::Stream stream(test::gpu());
  for (const int64_t inner : {1, 30, 1408, 14336}) {
    for (const int64_t rows : {1, 5}) {
      RandomMatrix both(rows, 2 * inner, 5), gate(rows, inner, 6), up(rows, inner, 7);
      for (float& value : both.values) value *= 4;
      both.values = rounded(both.values);
      const auto in = on_device(halves(both.values), stream);
      for (const bool turns : {false, true}) {
        if (turns && inner % gate_up_turn != 0) continue;
        const int64_t turn = turns ? gate_up_turn : inner;
        for (int64_t i = 0; i < rows * inner; ++i) {
          const int64_t row = i / inner, column = i % inner;
          const float* const from = both.row(row) + column / turn * 2 * turn + column % turn;
          gate.view().row(row)[column] = from[0];
          up.view().row(row)[column] = from[turn];
        }
        auto out = test::poisoned(static_cast<size_t>(rows * inner * 2), stream);
        silu_multiply_cuda(in.as<__half>(), rows, inner, turns, out.as<__half>(), false, stream);
        silu_multiply(gate, up);
        expect_rounded(floats(from_device<uint16_t>(out, gate.values.size(), stream)), gate.values, "silu");
      }
    }
  }
  const RandomMatrix table(11, 100, 8);
  const std::vector<int32_t> ids = {10, 0, 3, 3};
  const auto table_device = on_device(halves(table.values), stream), ids_device = on_device(ids, stream);
  auto x = test::poisoned(ids.size() * 400, stream);
  // Besides, the row of the angles' tables that belongs to a position: the fourth of 9.
  RandomMatrix cosines(9, 20, 8), sines(9, 20, 9);
  const auto cosines_device = on_device(cosines.values, stream), sines_device = on_device(sines.values, stream);
  const auto position = on_device(std::vector<int32_t>{3}, stream);
  auto cosine = test::poisoned(20 * 4, stream), sine = test::poisoned(20 * 4, stream);
  embed_cuda({table_device.data(),
              DType::f16,
              ids_device.as<int32_t>(),
              4,
              100,
              x.as<float>(),
              {cosines_device.as<float>(), sines_device.as<float>(), 20, position.as<int32_t>(), cosine.as<float>(),
               sine.as<float>()}},
             stream);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(from_device<float>(cosine, 20, stream)[static_cast<size_t>(i)], cosines.row(3)[i]);
    EXPECT_EQ(from_device<float>(sine, 20, stream)[static_cast<size_t>(i)], sines.row(3)[i]);
  }
  const auto got = from_device<float>(x, 400, stream);
  const auto expected = rounded(table.values);
  for (size_t r = 0; r < ids.size(); ++r) {
    for (size_t c = 0; c < 100; ++c) {
      ASSERT_EQ(got[r * 100 + c], expected[static_cast<size_t>(ids[r]) * 100 + c]);
    }
  }
}

TEST_F(ElementwiseCuda, OneRowProductsWithEveryOutput) {
  const device::Stream stream(test::gpu());
  for (const auto& [n, k] :
       std::vector<std::pair<int64_t, int64_t>>{{2, 8}, {6, 264}, {130, 520}, {1000, 4096}, {34, 14336}}) {
    RandomMatrix w(n, k, 9), x(1, k, 10), bias(1, n, 11), start(1, n, 12);
    w.values = rounded(w.values);
    x.values = rounded(x.values);
    const auto w_device = on_device(halves(w.values), stream), x_device = on_device(halves(x.values), stream);
    const auto bias_device = on_device(bias.values, stream);
    std::vector<double> sums(static_cast<size_t>(n)), magnitudes(sums.size());
    for (int64_t r = 0; r < n; ++r) {
      double sum = bias.values[static_cast<size_t>(r)], magnitude = 1;
      for (int64_t c = 0; c < k; ++c) {
        sum += double{w.row(r)[c]} * x.values[static_cast<size_t>(c)];
        magnitude += std::abs(double{w.row(r)[c]} * x.values[static_cast<size_t>(c)]);
      }
      sums[static_cast<size_t>(r)] = sum;
      magnitudes[static_cast<size_t>(r)] = magnitude;
    }
    DenseGemvArgs args;
    args.weight = w_device.as<__half>();
    args.x = x_device.as<__half>();
    args.bias = bias_device.as<float>();
    args.n = n;
    args.k = k;
    auto half = test::poisoned(static_cast<size_t>(n * 2), stream),
         exact = test::poisoned(static_cast<size_t>(n * 4), stream);
    auto residual = on_device(start.values, stream), gated = test::poisoned(static_cast<size_t>(n), stream);
    args.out = half.as<__half>();
    dense_gemv_cuda(args, stream);
    args.out = nullptr, args.out_fp32 = exact.as<float>();
    dense_gemv_cuda(args, stream);
    args.out_fp32 = nullptr, args.residual = residual.as<float>();
    dense_gemv_cuda(args, stream);
    args.residual = nullptr, args.gated = gated.as<__half>();
    dense_gemv_cuda(args, stream);
    const auto count = static_cast<size_t>(n);
    const auto got = from_device<float>(exact, count, stream);
    for (size_t i = 0; i < count; ++i) ASSERT_NEAR(got[i], sums[i], test::gamma(k) * magnitudes[i]) << n << " × " << k;
    expect_rounded(floats(from_device<uint16_t>(half, count, stream)), got, "half");
    const auto added = from_device<float>(residual, count, stream);
    for (size_t i = 0; i < count; ++i) ASSERT_FLOAT_EQ(added[i], start.values[i] + got[i]);
    RandomMatrix gate(1, n / 2, 0), up(1, n / 2, 0);
    const auto stored = rounded(got);
    std::copy_n(stored.begin(), n / 2, gate.values.begin());
    std::copy_n(stored.begin() + n / 2, n / 2, up.values.begin());
    silu_multiply(gate, up);
    expect_rounded(floats(from_device<uint16_t>(gated, count / 2, stream)), gate.values, "gated");
  }
}

}  // namespace
}  // namespace w4q::kernels
