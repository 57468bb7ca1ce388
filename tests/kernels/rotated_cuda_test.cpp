// Rotations of activations on the GPU, and linear layers of rotated passes.
#include <cmath>
#include <vector>

#include "core/float_formats.h"
#include "core/rng.h"
#include "device/buffer.h"
#include "device/properties.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "formats/rotation.h"
#include "kernels/rotate_input.h"
#include "kernels/rotated_linear.h"
#include "quantize/passes.h"
#include "quantize/rounding.h"
#include "repack/layout_registry.h"
#include "support.h"

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
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * static_cast<float>(random_normal(seed, i));
  return values;
}

std::vector<float> rotated_on_gpu(const InputRotation& rotation, const std::vector<float>& x, int64_t m,
                                  const std::vector<float>& scales) {
  const device::Stream stream;
  const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
  const auto factors = device::DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream);
  const auto divisors = device::DeviceBuffer::copy_of(bytes_of(scales), stream);
  device::DeviceBuffer output(x.size() * 4);
  RotateInputArgs args;
  args.m = m, args.k = rotation.k(), args.block = rotation.rotation().block;
  args.activation = DType::f32;
  args.x = input.data(), args.ldx = args.k;
  args.factors = factors.as<float>();
  args.input_scale = scales.empty() ? nullptr : divisors.as<float>();
  args.y = output.data(), args.ldy = args.k;
  rotate_input(args, stream.get());
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

/// A linear on the GPU: planes as kbit, and its factors.
struct DeviceLinear {
  std::vector<device::DeviceBuffer> buffers;
  std::vector<RotatedDevicePass> passes;

  DeviceLinear(const formats::PackedLinear& linear, const device::Stream& stream) {
    const float* shared = nullptr;
    for (size_t p = 0; p < linear.passes.size(); ++p) {
      const auto kbit = formats::rotated_as_kbit(linear.passes[p]);
      const auto packed = repack::layout_row("kbit-fragment").pack(kbit);
      const auto keep = [&](std::span<const std::byte> bytes) {
        return buffers.emplace_back(device::DeviceBuffer::copy_of(bytes, stream)).data();
      };
      RotatedDevicePass pass;
      pass.weight.scheme = packed.scheme;
      pass.weight.n = packed.n, pass.weight.k = packed.k;
      pass.weight.codes = reinterpret_cast<uint32_t*>(keep(packed.plane(PlaneRole::codes).bytes.bytes()));
      pass.weight.scales = keep(packed.plane(PlaneRole::scales).bytes.bytes());
      pass.weight.codebook = reinterpret_cast<float*>(keep(packed.plane(PlaneRole::codebook).bytes.bytes()));
      pass.weight.table_max = formats::kbit_table_max(packed.plane(PlaneRole::codebook).bytes.as<float>());
      pass.weight.scale_max = 16;
      const bool same = p > 0 && linear.rotations[p].rotation() == linear.rotations[0].rotation();
      if (!same) shared = reinterpret_cast<float*>(keep(std::as_bytes(linear.rotations[p].factors())));
      pass.factors = shared;
      pass.block = linear.rotations[p].rotation().block;
      passes.push_back(pass);
    }
    stream.synchronize();
  }
};

/// Relative Frobenius error against the fp64 product of the decoded weights. The kbit kernels alone are below 1e-3 for
/// f16; rounding the rotated input to 16 bits adds 2^-11 / √3 · √… in the mean: 1.3e-3 for both, twice over two passes.
double relative_error(const std::vector<formats::Scheme>& further, bool shared, int64_t m, bool scaled) {
  const int64_t n = 200, k = 1408;
  const auto values = normals(n * k, 3, 0.02f);
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  const auto plan = quantize::plan_passes(formats::parse_scheme("rotated4-d128"), further, {.shared = shared});
  auto linear = quantize::quantize_passes(view, plan, [](const TensorView& pass, const formats::Scheme& scheme) {
                  return quantize::rounding_quantizer(scheme).run(pass, scheme, {});
                }).linear;
  if (scaled) {
    for (int64_t c = 0; c < k; ++c) linear.input_scale.push_back(0.5f + static_cast<float>(c % 5));
  }
  const device::Stream stream;
  const DeviceLinear weight(linear, stream);
  std::vector<uint16_t> x(static_cast<size_t>(m * k));
  const auto exact = normals(m * k, 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = f16_from_f32(exact[i]);
  const auto bias = normals(n, 5);
  const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
  const auto biases = device::DeviceBuffer::copy_of(bytes_of(bias), stream);
  const auto divisors = device::DeviceBuffer::copy_of(bytes_of(linear.input_scale), stream);
  device::DeviceBuffer y(static_cast<size_t>(m * n * 2)), workspace(rotated_linear_workspace(m, n, k));
  workspace.fill(0, stream);
  RotatedLinearArgs args;
  args.m = m;
  args.x = input.data(), args.ldx = k;
  args.input_scale = scaled ? divisors.as<float>() : nullptr;
  args.passes = weight.passes;
  args.bias = biases.as<float>();
  args.y = y.data(), args.ldy = n;
  args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
  rotated_linear(args, stream.get());
  std::vector<uint16_t> got(static_cast<size_t>(m * n));
  y.download(std::as_writable_bytes(std::span(got)), stream);
  stream.synchronize();

  double error = 0, signal = 0;
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t o = 0; o < n; ++o) {
    formats::decode_linear_row(linear, o, row);
    for (int64_t r = 0; r < m; ++r) {
      double sum = bias[static_cast<size_t>(o)];
      for (int64_t c = 0; c < k; ++c) {
        sum += double{row[static_cast<size_t>(c)]} * f32_from_f16(x[static_cast<size_t>(r * k + c)]);
      }
      error += std::pow(f32_from_f16(got[static_cast<size_t>(r * n + o)]) - sum, 2);
      signal += sum * sum;
    }
  }
  return std::sqrt(error / signal);
}

TEST_F(RotatedGpu, LinearsAgreeWithTheDecodedWeights) {
  const auto four = formats::parse_scheme("rotated4-d128"), two = formats::parse_scheme("rotated2-d128");
  for (const int64_t m : {1, 7, 64}) {
    EXPECT_LT(relative_error({}, true, m, false), 1.5e-3) << m;
    EXPECT_LT(relative_error({four}, true, m, false), 2e-3) << m;
    EXPECT_LT(relative_error({four}, false, m, true), 2e-3) << m;
    EXPECT_LT(relative_error({two}, false, m, false), 2e-3) << m;
  }
}

TEST_F(RotatedGpu, RefusesWhatDoesNotFit) {
  RotateInputArgs args;
  args.m = 1, args.k = 64, args.block = 48, args.ldx = args.ldy = 64;
  test::expect_error(ErrorCode::bad_argument, {"power of two"}, [&] { rotate_input(args, nullptr); });
  args.block = 2048;
  test::expect_error(ErrorCode::bad_argument, {"1024"}, [&] { rotate_input(args, nullptr); });
  args.block = 64;
  test::expect_error(ErrorCode::bad_argument, {"null"}, [&] { rotate_input(args, nullptr); });
}

}  // namespace
}  // namespace w4q::kernels
