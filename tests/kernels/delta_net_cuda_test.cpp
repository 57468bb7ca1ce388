// The gated delta net on the GPU against the CPU's: shapes of the models that have it and odd ones, however a sequence is cut.
#include "kernels/delta_net/delta_net_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "kernels/delta_net/chunk_cuda.h"
#include "kernels/elementwise/elementwise.h"
#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using test::floats;
using test::from_device;
using test::on_device;
using test::RandomMatrix;

constexpr int64_t length = 203;  // three chunks and a part of one
constexpr float eps = 1e-6F;

/// Products of the projections, in parts, and what the layer holds.
struct Net {
  explicit Net(const DeltaShape& own)
      : shape(own),
        products(length, own.channels() + own.values() + 2 * own.value_heads, 1),
        convolution(own.channels(), own.taps, 2),
        rate(1, own.value_heads, 3),
        bias(1, own.value_heads, 4),
        norm(1, own.value_dim, 5) {}

  /// out [length × values], fp32.
  std::vector<float> on_cpu() {
    const int64_t heads = shape.value_heads;
    RandomMatrix mixed(length, shape.channels(), 9), beta(length, heads, 9), decay(length, heads, 9);
    for (int64_t r = 0; r < length; ++r) {
      const float* const row = products.row(r);
      std::copy_n(row, shape.channels(), mixed.view().row(r));
      for (int64_t h = 0; h < heads; ++h) {
        const float* const small = row + shape.channels() + shape.values();
        beta.view().row(r)[h] = 1 / (1 + std::exp(-small[h]));
        const float step = small[heads + h] + bias.values[static_cast<size_t>(h)];
        decay.view().row(r)[h] = -std::exp(rate.values[static_cast<size_t>(h)]) * std::log1p(std::exp(step));
      }
    }
    std::vector<float> history(static_cast<size_t>(shape.history_size())),
        state(static_cast<size_t>(shape.state_size()));
    causal_convolution(shape, convolution.values, history.data(), mixed.view());
    RandomMatrix out(length, shape.values(), 9);
    delta_rule(shape, mixed.view(), beta.view(), decay.view(), state.data(), out.view());
    rms_norm_heads(out.view(), norm.values, eps);
    for (int64_t r = 0; r < length; ++r) {
      for (int64_t c = 0; c < shape.values(); ++c) {
        const float gate = products.row(r)[shape.channels() + c];
        out.view().row(r)[c] *= gate / (1 + std::exp(-gate));
      }
    }
    return out.values;
  }

  std::vector<float> on_gpu(const std::vector<int64_t>& chunks) {
    const device::Stream stream(test::gpu());
    const auto all = on_device(products.values, stream), taps = on_device(convolution.values, stream);
    const auto rates = on_device(rate.values, stream), biases = on_device(bias.values, stream);
    const auto norms = on_device(norm.values, stream);
    auto history = test::poisoned(static_cast<size_t>(shape.history_size()) * 4, stream);
    auto state = test::poisoned(static_cast<size_t>(shape.state_size()) * 4, stream);
    auto scratch = test::poisoned(static_cast<size_t>(length * delta_scratch(shape)) * 4, stream);
    auto out = test::poisoned(static_cast<size_t>(length * shape.values()) * 2, stream);
    int64_t first = 0;
    for (const int64_t rows : chunks) {
      DeltaNetArgs args;
      args.shape = shape;
      args.rows = rows;
      args.products = all.as<float>() + first * products.cols;
      args.stride = products.cols;
      args.convolution = taps.as<float>(), args.rate = rates.as<float>(), args.bias = biases.as<float>();
      args.norm = norms.as<float>();
      args.eps = eps;
      args.memory = {history.as<float>(), state.as<float>()};
      args.begins = first == 0;
      args.scratch = scratch.as<float>();
      args.out = out.as<__half>() + first * shape.values();
      delta_net_cuda(args, stream);
      first += rows;
    }
    return floats(from_device<uint16_t>(out, static_cast<size_t>(length * shape.values()), stream));
  }

  DeltaShape shape;
  RandomMatrix products, convolution, rate, bias, norm;
};

TEST(DeltaNetCuda, FollowsTheCpuInAnyChunks) {
  std::string why;
  if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  for (const DeltaShape& shape :
       {DeltaShape{2, 6, 8, 12, 4}, DeltaShape{16, 32, 128, 128, 4}, DeltaShape{2, 4, 64, 64, 4},
        DeltaShape{1, 2, 256, 256, 4}, DeltaShape{3, 3, 100, 33, 2}, DeltaShape{1, 8, 32, 16, 8}}) {
    Net net(shape);
    const auto expected = net.on_cpu();
    for (const auto& parts : std::vector<std::vector<int64_t>>{{203},
                                                               {1, 202},
                                                               {64, 75, 64},
                                                               {40, 1, 31, 131},
                                                               {29, 29, 29, 29, 29, 29, 29},
                                                               std::vector<int64_t>(203, 1)}) {
      const auto found = net.on_gpu(parts);
      const bool chunks = std::ranges::any_of(parts, [&](int64_t rows) { return takes_delta_chunks(shape, rows); });
      // f16 rounds by 2^-11; sums are taken in another order, and small ones are divided by their root mean square. Of
      // chunks keys, queries and what rows are to each other are f16, the state and values tf32 where they are multiplied:
      // emulated on the CPU for 120 heads like these, the largest was .6 of this and the root mean square 3.7e-4.
      const double bound = chunks ? 1e-2 : 2e-3;
      double largest = 0, squares = 0, size = 0;
      for (size_t i = 0; i < found.size(); ++i) {
        const double value = double{expected[i]}, error = double{found[i]} - value;
        ASSERT_TRUE(std::isfinite(found[i])) << i;
        largest = std::max(largest, std::abs(error) / (bound + bound * std::abs(value)));
        squares += error * error, size += value * value;
      }
      EXPECT_LE(largest, 1) << shape.key_dim << " × " << shape.value_dim << ", " << parts.size() << " parts";
      EXPECT_LE(std::sqrt(squares / size), 6e-4) << shape.key_dim << " × " << shape.value_dim << ", " << parts.size();
    }
  }
}

}  // namespace
}  // namespace w4q::kernels
