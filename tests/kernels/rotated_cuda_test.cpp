// Rotations of activations on the GPU, and linear layers of rotated passes.
#include <algorithm>
#include <cmath>
#include <ostream>
#include <vector>

#include "core/float_formats.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/cublas.h"
#include "device/graph.h"
#include "device/properties.h"
#include "formats/rotated.h"
#include "formats/rotation.h"
#include "gpu.h"
#include "kernels/common/table_stretch.h"
#include "kernels/linear/kernel_row.h"
#include "kernels/rotated/pack.h"
#include "kernels/rotated/rotate_input.h"
#include "pooled_normal.h"
#include "quantize/passes.h"
#include "quantize/rounding.h"
#include "repack/layout_registry.h"
#include "support.h"
#include "test_workspace.h"

namespace w4q::kernels {
namespace {

using formats::InputRotation;
using formats::PlaneRole;

class RotatedGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

std::vector<float> normals(int64_t count, uint64_t seed, float scale = 1) {
  std::vector<float> values(static_cast<size_t>(count));
  test::fill_normal(values, seed, scale);
  return values;
}

std::vector<float> rotated_on_gpu(const InputRotation& rotation, const std::vector<float>& x, int64_t m,
                                  const std::vector<float>& scales) {
  const device::Stream stream(test::gpu());
  const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
  const auto factors = device::DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream);
  const auto divisors = device::DeviceBuffer::copy_of(bytes_of(scales), stream);
  device::DeviceBuffer output(test::gpu(), x.size() * 4);
  RotateInputArgs args;
  args.m = m, args.k = rotation.k(), args.block = rotation.rotation().block;
  args.activation = DType::f32;
  args.x = input.data(), args.ldx = args.k;
  args.factors = factors.as<float>();
  args.input_scale = scales.empty() ? nullptr : divisors.as<float>();
  args.y = output.data(), args.ldy = args.k;
  rotate_input(args, stream);
  std::vector<float> result(x.size());
  output.download(std::as_writable_bytes(std::span(result)), stream);
  stream.synchronize();
  return result;
}

TEST_F(RotatedGpu, RotationsAreThoseOfTheCpuBitForBit) {
  for (const int64_t block : {2, 32, 64, 128, 256, 1024}) {
    for (const int64_t k : {1, 31, 128, 200, 1408, 4096, 5001}) {
      const InputRotation rotation({block, 42}, k);
      for (const bool scaled : {false, true}) {
        const int64_t m = 3;
        const auto x = normals(m * k, 1);
        std::vector<float> scales;
        for (int64_t c = 0; scaled && c < k; ++c) scales.push_back(0.3f + static_cast<float>(c % 7));
        std::vector<float> expected = x;
        for (int64_t r = 0; r < m; ++r) {
          const auto row = std::span(expected).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k));
          for (size_t c = 0; scaled && c < row.size(); ++c) row[c] /= scales[c];
          rotation.rotate(row);
        }
        EXPECT_EQ(rotated_on_gpu(rotation, x, m, scales), expected) << block << " " << k;
      }
    }
  }
}

// The shape of prompts, which a kernel of its own serves: rows that are no multiple of those a thread takes, blocks of a
// row that are none of those a thread block has, and two rotations of the same input.
TEST_F(RotatedGpu, RotationsOfManyRowsAreThoseOfTheCpuRoundedOnce) {
  const device::Stream stream(test::gpu());
  for (const int64_t k : {128, 1408, 4096, 5120}) {
    const InputRotation rotation({128, 42}, k), second({128, 43}, k);
    for (const int64_t m : {8, 13, 70}) {
      for (const bool scaled : {false, true}) {
        std::vector<uint16_t> x(static_cast<size_t>(m * k)), expected(2 * x.size()), found(2 * x.size());
        const auto values = normals(m * k, 3);
        std::vector<float> scales;
        for (int64_t c = 0; c < k; ++c) scales.push_back(0.3f + static_cast<float>(c % 7));
        for (size_t i = 0; i < x.size(); ++i) x[i] = f16_from_f32(values[i]);
        for (int64_t r = 0; r < 2 * m; ++r) {
          std::vector<float> row(static_cast<size_t>(k));
          for (size_t c = 0; c < row.size(); ++c) {
            row[c] = f32_from_f16(x[static_cast<size_t>(r % m * k) + c]);
            if (scaled) row[c] /= scales[c];
          }
          (r < m ? rotation : second).rotate(row);
          for (size_t c = 0; c < row.size(); ++c) expected[static_cast<size_t>(r * k) + c] = f16_from_f32(row[c]);
        }
        const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
        const auto factors = device::DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream);
        const auto others = device::DeviceBuffer::copy_of(std::as_bytes(second.factors()), stream);
        const auto divisors = device::DeviceBuffer::copy_of(bytes_of(scales), stream);
        device::DeviceBuffer output(test::gpu(), expected.size() * 2);
        RotateInputArgs args;
        args.m = m, args.k = k, args.block = 128;
        args.x = input.data(), args.ldx = k;
        args.factors = factors.as<float>(), args.second_factors = others.as<float>();
        args.input_scale = scaled ? divisors.as<float>() : nullptr;
        args.y = output.data(), args.ldy = k, args.second_y = output.as<uint16_t>() + m * k;
        rotate_input(args, stream);
        output.download(std::as_writable_bytes(std::span(found)), stream);
        stream.synchronize();
        EXPECT_EQ(found, expected) << m << " × " << k << (scaled ? ", scaled" : "");
      }
    }
  }
}

/// A linear on the GPU, its passes and their factors.
struct RotatedOnGpu : DeviceLinear {
  std::vector<device::DeviceBuffer> buffers;

  RotatedOnGpu(const formats::PackedLinear& linear, const device::Stream& stream) {
    const float* shared = nullptr;
    const uint32_t* signs = nullptr;
    RotatedPlanes first;
    for (size_t p = 0; p < linear.passes.size(); ++p) {
      const formats::PackedWeight& canonical = linear.passes[p];
      const RotatedPlanes planes = rotated_planes(canonical);
      if (p == 0) first = planes;
      const auto keep = [&](std::span<const std::byte> bytes) {
        return buffers.emplace_back(device::DeviceBuffer::copy_of(bytes, stream)).data();
      };
      DevicePass pass;
      pass.scheme = rotated_device_scheme(canonical.scheme);
      pass.layout = "rotated-fragment";
      pass.n = canonical.n, pass.k = canonical.k;
      const bool is_kbit = canonical.scheme.family == formats::SchemeFamily::kbit;
      const auto packed = repack::layout_row(is_kbit ? "kbit-fragment" : "rotated-fragment").pack(canonical);
      pass.codes = reinterpret_cast<uint32_t*>(keep(packed.plane(formats::PlaneRole::codes).bytes.bytes()));
      pass.scales = keep(bytes_of(planes.norms));
      pass.codebook = reinterpret_cast<float*>(keep(bytes_of(planes.levels)));
      pass.table_max = planes.level_max, pass.table_stretch = table_stretch(planes.levels),
      pass.scale_max = planes.norm_max;
      pass.table_over_first = level_ratio(first.levels, planes.levels);
      const bool same = p > 0 && linear.rotations[p].rotation() == linear.rotations[0].rotation();
      if (!same) {
        shared = reinterpret_cast<float*>(keep(std::as_bytes(linear.rotations[p].factors())));
        signs = reinterpret_cast<uint32_t*>(keep(bytes_of(rotation_signs(linear.rotations[p]))));
        stream.synchronize();
      }
      pass.rotation.factors = shared;
      pass.rotation.signs = signs;
      pass.rotation.block = linear.rotations[p].rotation().block;
      passes.push_back(pass);
      stream.synchronize();  // what was copied may go
    }
    stream.synchronize();
  }
};

struct Case {
  std::string_view first;
  std::vector<std::string_view> further = {};
  bool shared = true;
  bool scaled = false;
  int64_t n = 200, k = 1408;
};

formats::PackedLinear quantized(const Case& c, float size) {
  const auto values = normals(c.n * c.k, 3, size);
  const TensorView view{"w", DType::f32, {c.n, c.k}, bytes_of(values)};
  std::vector<formats::Scheme> further;
  for (const auto name : c.further) further.push_back(formats::parse_scheme(name));
  const auto plan = quantize::plan_passes(formats::parse_scheme(c.first), further, {.shared = c.shared});
  return quantize::quantize_passes(view, plan,
                                   [](const TensorView& pass, const formats::Scheme& scheme) {
                                     return quantize::rounding_quantizer(scheme).run(pass, scheme, {});
                                   })
      .linear;
}

/// Relative Frobenius error against the fp64 product of the decoded weights.
/// With `add`, the product is added to ones, in f32.
double relative_error(const Case& c, int64_t m, bool add) {
  const int64_t n = c.n, k = c.k;
  auto linear = quantized(c, 0.02f);
  if (c.scaled) {
    for (int64_t i = 0; i < k; ++i) linear.input_scale.push_back(0.5f + static_cast<float>(i % 5));
  }
  const device::Stream stream(test::gpu());
  RotatedOnGpu weight(linear, stream);
  std::vector<uint16_t> x(static_cast<size_t>(m * k));
  const auto exact = normals(m * k, 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = f16_from_f32(exact[i]);
  const auto bias = normals(n, 5);
  const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
  const auto biases = device::DeviceBuffer::copy_of(bytes_of(bias), stream);
  const auto divisors = device::DeviceBuffer::copy_of(bytes_of(linear.input_scale), stream);
  weight.bias = biases.as<float>();
  weight.input_scale = c.scaled ? divisors.as<float>() : nullptr;
  const std::vector<float> ones(static_cast<size_t>(m * n), 1.0f);
  auto y = device::DeviceBuffer::copy_of(bytes_of(ones), stream);
  test::TestWorkspace workspace(weight, m, stream);
  LinearCall call;
  call.m = m;
  call.x = input.data(), call.ldx = k;
  call.y = y.data(), call.ldy = n;
  call.fp32 = add;
  call.residual = add ? y.data() : nullptr;
  multiply(weight, test::TestWorkspace::plan(weight), call, workspace.get(), stream);
  std::vector<float> got(ones.size());
  std::vector<uint16_t> halves(ones.size());
  y.download(add ? std::as_writable_bytes(std::span(got)) : std::as_writable_bytes(std::span(halves)), stream);
  stream.synchronize();
  if (!add) std::ranges::transform(halves, got.begin(), f32_from_f16);

  double error = 0, signal = 0;
  std::vector<double> values_of_x(x.size());
  std::ranges::transform(x, values_of_x.begin(), [](uint16_t value) { return double{f32_from_f16(value)}; });
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t o = 0; o < n; ++o) {
    formats::decode_linear_row(linear, o, row);
    for (int64_t r = 0; r < m; ++r) {
      double sum = bias[static_cast<size_t>(o)] + (add ? 1 : 0);
      for (int64_t i = 0; i < k; ++i) {
        sum += row[static_cast<size_t>(i)] * values_of_x[static_cast<size_t>(r * k + i)];
      }
      error += std::pow(double{got[static_cast<size_t>(r * n + o)]} - sum, 2);
      signal += sum * sum;
    }
  }
  return std::sqrt(error / signal);
}

const Case cases[] = {
    {"rotated4-d128"},
    {"rotated4-d128", {"rotated4-d128"}},
    {"rotated4-d128", {"rotated4-d128"}, false, true},
    {"rotated4-d128", {"rotated2-d128"}, false},
    {"rotated4-d128", {"rotated2-d128"}, true, true},
    {"rotated4-d128-e4m4", {"rotated4-d128"}, false},
    {"rotated3-d64", {"rotated3-d32", "rotated2-d128"}, false},
    {"rotated5-d32", {"rotated5-d32-f32"}},
    {"rotated2-d256", {"rotated4-d64"}, false},
    // Runs that go through several rows and passes, rows that end within a tile, ragged groups, long rows.
    {"rotated4-d128", {"rotated4-d128"}, false, false, 3000, 448},
    {"rotated4-d128", {"rotated4-d128"}, true, false, 3000, 384},
    {"rotated4-d64", {"rotated4-d64"}, false, false, 5000, 192},
    {"rotated4-d64", {"rotated2-d64"}, false, true, 1000, 1000},
    {"rotated3-d32", {"rotated3-d32"}, false, false, 300, 416},
    {"rotated4-d128", {}, true, false, 64, 14336},
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.first; }

class RotatedLinears : public RotatedGpu, public testing::WithParamInterface<Case> {};

/// Of rotated passes, measured 1.3e-3; of further ones once more.
double bound_of(const Case& c) { return c.further.empty() ? 1.5e-3 : 2e-3; }

void expect_agreement(const Case& c, int64_t m) {
  for (const bool add : {false, true}) {
    EXPECT_LT(relative_error(c, m, add), bound_of(c)) << m << " rows" << (add ? ", f32" : "");
  }
}

TEST_P(RotatedLinears, AgreeWithTheDecodedWeights) {
  for (const int64_t m : {1, 3, 7, 16, 29, 64}) expect_agreement(GetParam(), m);
}

// By itself: with kernels of cuBLAS, in which compute-sanitizer sees races.
TEST_P(RotatedLinears, OfManyRowsAgreeWithTheDecodedWeights) { expect_agreement(GetParam(), 130); }

INSTANTIATE_TEST_SUITE_P(Rotated, RotatedLinears, testing::ValuesIn(cases), [](const auto& tested) {
  const Case& c = tested.param;
  std::string name = concat(c.first, c.shared ? "_shared" : "_own", "_", c.further.size(), "_", c.n, "x", c.k);
  for (const auto scheme : c.further) name += concat("_", scheme);
  std::erase(name, '-');
  return name;
});

/// A square linear applied again and again, to what it made last, by launches that overlap.
class Chain {
 public:
  static constexpr int64_t size = 512;
  static constexpr int length = 6;

  Chain(const DeviceLinear& linear, int64_t m, const device::Stream& stream)
      : linear_(linear), plan_(test::TestWorkspace::plan(linear)), m_(m), workspace_(linear, m, stream) {
    std::vector<uint16_t> x(static_cast<size_t>(m * size));
    const auto values = normals(m * size, 7);
    std::ranges::transform(values, x.begin(), f16_from_f32);
    for (int i = 0; i <= length; ++i) steps_.push_back(device::DeviceBuffer::copy_of(bytes_of(x), stream));
    stream.synchronize();
  }
  void launch(const device::Stream& stream, bool overlap) {
    for (size_t i = 0; i < length; ++i) {
      LinearCall call;
      call.m = m_;
      call.x = steps_[i].data(), call.ldx = size;
      call.y = steps_[i + 1].data(), call.ldy = size;
      call.weights_ready = overlap;
      multiply(linear_, plan_, call, workspace_.get(), stream);
    }
  }
  std::vector<uint16_t> result(const device::Stream& stream) {
    std::vector<uint16_t> result(static_cast<size_t>(m_ * size));
    steps_.back().download(std::as_writable_bytes(std::span(result)), stream);
    stream.synchronize();
    return result;
  }
  bool left_words_empty(const device::Stream& stream) { return workspace_.left_semaphores_empty(stream); }

 private:
  const DeviceLinear& linear_;
  LaunchPlan plan_;
  int64_t m_;
  test::TestWorkspace workspace_;
  std::vector<device::DeviceBuffer> steps_;
};

// Also side by side, where blocks of one launch may have to wait for those of the other.
TEST_F(RotatedGpu, LaunchesThatOverlapMakeTheSameEveryTime) {
  const device::Stream stream(test::gpu()), other(test::gpu());
  for (const bool shared : {true, false}) {
    const Case c{"rotated4-d128", {"rotated4-d128"}, shared, false, Chain::size, Chain::size};
    const RotatedOnGpu linear(quantized(c, 0.04f), stream);
    for (const int64_t m : {1, 2, 5, 16, 40, 64}) {
      Chain chain(linear, m, stream), beside(linear, m, stream);
      chain.launch(stream, false);
      const auto expected = chain.result(stream);
      const device::Graph graph(stream, [&] { chain.launch(stream, true); });
      EXPECT_EQ(graph.nodes(), Chain::length) << "one launch for a product of " << m << " rows";
      for (int i = 0; i < 20; ++i) {
        graph.launch(stream);
        beside.launch(other, true);
      }
      EXPECT_EQ(chain.result(stream), expected) << m << " rows";
      EXPECT_EQ(beside.result(other), expected) << m << " rows, side by side";
      EXPECT_TRUE(chain.left_words_empty(stream) && beside.left_words_empty(other)) << m << " rows";
    }
  }
}

TEST_F(RotatedGpu, RefusesWhatDoesNotFit) {
  const device::Stream stream(test::gpu());
  RotateInputArgs args;
  args.m = 1, args.k = 64, args.block = 48, args.ldx = args.ldy = 64;
  test::expect_error(ErrorCode::bad_argument, {"power of two"}, [&] { rotate_input(args, stream); });
  args.block = 2048;
  test::expect_error(ErrorCode::bad_argument, {"1024"}, [&] { rotate_input(args, stream); });
  args.block = 64;
  test::expect_error(ErrorCode::bad_argument, {"null"}, [&] { rotate_input(args, stream); });
}

TEST_F(RotatedGpu, NamesTheKernelsThatMultiply) {
  const device::Stream stream(test::gpu());
  const Case c{"rotated4-d128", {"rotated4-d128"}};
  RotatedOnGpu linear(quantized(c, 0.02f), stream);
  const auto names = [&](int64_t m) {
    std::vector<std::string_view> kernels;
    for (const auto& step : choose_launches(test::gpu().properties(), linear, m)) kernels.push_back(step.row->name);
    return kernels;
  };
  using Names = std::vector<std::string_view>;
  for (const size_t passes : {2, 1}) {
    linear.passes.resize(passes);
    EXPECT_EQ(names(1), Names{"rotated-gemv"});
    const Names many = names(64);
    ASSERT_EQ(many.size(), 1u) << "one launch";
    EXPECT_TRUE(many[0] == "rotated-gemm" || many[0] == "rotated-wgmma") << many[0];
    EXPECT_EQ(names(4096), Names{device::have_cublas() ? "rotated-wide" : many[0]}) << passes;
  }
}

TEST_F(RotatedGpu, RefusesStretchesThatAreNone) {
  const device::Stream stream(test::gpu());
  RotatedOnGpu linear(quantized({"rotated4-d128"}, 0.02f), stream);
  linear.passes[0].table_stretch = 2;
  device::DeviceBuffer memory(test::gpu(), 1 << 16);
  test::TestWorkspace workspace(linear, 1, stream);
  LinearCall call;
  call.m = 1;
  call.x = memory.data(), call.ldx = 1408;
  call.y = memory.data(), call.ldy = 200;
  test::expect_error(ErrorCode::bad_argument, {"stretch"},
                     [&] { multiply(linear, test::TestWorkspace::plan(linear), call, workspace.get(), stream); });
}

}  // namespace
}  // namespace w4q::kernels
