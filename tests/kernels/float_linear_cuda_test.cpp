// The GPU's linear layers of small floats against an fp64 product of the decoded weights.
#include <cmath>
#include <cstring>
#include <vector>

#include "core/rng.h"
#include "fused_linear_check.h"
#include "gpu.h"
#include "kernels/small_float/dequantize.h"
#include "kernels/small_float/tile_scales.h"
#include "laws/registries.h"
#include "linear_cuda_check.h"
#include "pooled_normal.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using test::Activations;

constexpr const char* schemes[] = {"nvfp4",           "nvfp4-div",    "mxfp4",
                                   "mxfp8",           "fp8-tensor",   "fp8-channel",
                                   "fp8-channel-f16", "fp8-block128", "fp8-block128-e8m0"};

struct Size {
  int64_t n, k;
};

PackedWeight canonical_weight(const char* name, Size size, double magnitude) {
  const Scheme scheme = formats::parse_scheme(name);
  std::vector<float> values(static_cast<size_t>(size.n * size.k));
  // Rows and blocks differ in magnitude.
  for (size_t i = 0; i < values.size(); ++i) {
    const double row = 1.0 + 0.5 * static_cast<double>(i / static_cast<size_t>(size.k) % 5);
    const double block = std::ldexp(1.0, static_cast<int>(random_bits(5, i / 16) % 4));
    values[i] = static_cast<float>(magnitude * row * block * test::pooled_normal(7, i));
  }
  return test::encoded(scheme, values, size.n, size.k);
}

/// A weight on both sides.
class Weight {
 public:
  Weight(const char* name, Size size, double magnitude, const device::Stream& stream)
      : canonical_(canonical_weight(name, size, magnitude)), decoded_(static_cast<size_t>(size.n * size.k)) {
    const auto& row = formats::scheme_row(canonical_.scheme.family);
    for (int64_t r = 0; r < size.n; ++r) {
      row.decode_row(canonical_, r,
                     std::span(decoded_).subspan(static_cast<size_t>(r * size.k), static_cast<size_t>(size.k)));
    }
    const PackedWeight packed = repack::layout_row("float-fragment").pack(canonical_);
    const PackedWeight* const one[] = {&canonical_};
    const FloatScales scales = float_scales(one, 0);
    codes_ = upload(packed.plane(PlaneRole::codes).bytes.bytes(), stream);
    scales_ = upload(scales.tile_pairs.empty() ? packed.plane(PlaneRole::scales).bytes.bytes()
                                               : std::as_bytes(std::span(scales.tile_pairs)),
                     stream);
    codebook_ = upload(packed.plane(PlaneRole::codebook).bytes.bytes(), stream);
    if (!scales.outputs.empty()) factors_ = upload(std::as_bytes(std::span(scales.outputs)), stream);
    largest_ = scales.largest;
  }

  DevicePass on_device() const {
    return {.scheme = canonical_.scheme,
            .layout = "float-fragment",
            .n = canonical_.n,
            .k = canonical_.k,
            .codes = codes_.as<uint32_t>(),
            .scales = scales_.data(),
            .codebook = codebook_.as<float>(),
            .scale_max = largest_,
            .output_factors = factors_.size() > 0 ? factors_.as<float>() : nullptr};
  }
  const std::vector<float>& decoded() const { return decoded_; }

 private:
  static device::DeviceBuffer upload(std::span<const std::byte> bytes, const device::Stream& stream) {
    auto buffer = device::DeviceBuffer::copy_of(bytes, stream);
    stream.synchronize();
    return buffer;
  }

  PackedWeight canonical_;
  std::vector<float> decoded_;
  device::DeviceBuffer codes_, scales_, codebook_, factors_;
  float largest_ = 1;
};

class FloatLinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_F(FloatLinearCuda, EverySchemeAndRowCountOverRaggedShapes) {
  const device::Stream stream(test::gpu());
  for (const char* name : schemes) {
    for (const auto [n, k] : {Size{64, 64}, {1, 1}, {3, 31}, {65, 33}, {100, 96}, {192, 1408}, {257, 4097}}) {
      const Weight weight(name, {n, k}, 0.02, stream);
      for (const int64_t m : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 129}) {
        const Activations x(m, k, k, DType::f16);
        const auto kernels = test::accepting_kernels(weight.on_device(), m, DType::f16);
        ASSERT_FALSE(kernels.empty());
        for (const KernelRow* kernel : kernels) {
          const auto outcome =
              test::run_linear(weight.on_device(), weight.decoded(), x, {.bias = {}, .kernel = kernel}, stream);
          ASSERT_LE(outcome.relative_error, test::linear_bound(DType::f16, n * k))
              << kernel->name << ": " << name << " " << n << " × " << k << ", " << m << " rows";
        }
      }
    }
  }
}

TEST_F(FloatLinearCuda, BiasStrideResidualTypeAndUnalignedRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {1, 5, 20, 130};
  for (const char* name : {"nvfp4", "mxfp8", "fp8-channel"}) {
    for (const Size size : {Size{300, 200}, {320, 200}}) {
      const Weight weight(name, size, 0.02, stream);
      test::check_every_form(weight.on_device(), weight.decoded(), rows, stream);
    }
  }
}

/// Results of f32: those of f16 end at 2^-24.
TEST_F(FloatLinearCuda, AnyMagnitudeOfWeights) {
  const device::Stream stream(test::gpu());
  const Size size{256, 512};
  test::LinearExtras extras;
  extras.fp32 = true;
  for (const char* name : schemes) {
    for (const double magnitude : {1e-9, 1e-4, 30.0, 2000.0}) {
      const Weight weight(name, size, magnitude, stream);
      for (const int64_t m : {1, 4, 16, 40}) {
        const Activations x(m, size.k, size.k, DType::f16);
        const auto outcome = test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream);
        EXPECT_LE(outcome.relative_error, test::linear_bound(DType::f16, size.n * size.k))
            << name << ", " << magnitude << ", " << m << " rows";
      }
    }
  }
}

TEST_F(FloatLinearCuda, NormsAndSiluArePartOfProducts) {
  const device::Stream stream(test::gpu());
  for (const char* name : {"nvfp4", "mxfp4", "mxfp8", "fp8-block128", "fp8-channel"}) {
    SCOPED_TRACE(name);
    for (const auto& [hidden, inputs, outputs] :
         {std::array<int64_t, 3>{64, 64, 64}, {200, 500, 320}, {1024, 4096, 640}}) {
      const Weight first(name, {hidden, inputs}, 0.02, stream);
      const Weight second(name, {outputs, hidden}, 0.02, stream);
      test::check_fused_chain({first.on_device(), first.decoded()}, {second.on_device(), second.decoded()}, stream);
    }
  }
}

TEST_F(FloatLinearCuda, SiluIsPartOfProductsOfManyRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {17, 40, 128};
  for (const char* name : {"nvfp4", "mxfp4", "fp8-block128"}) {
    const Weight weight(name, {256, 2048}, 0.02, stream);
    test::check_gated_rows(weight.on_device(), weight.decoded(), rows, stream);
  }
}

/// Class E1; f32 bit for bit but where scales are divided.
TEST_F(FloatLinearCuda, DecodingIsTheDefinition) {
  const device::Stream stream(test::gpu());
  const Size size{200, 321};
  for (const char* name : schemes) {
    const Weight weight(name, size, 0.02, stream);
    const DevicePass pass = weight.on_device();
    const small_float::DeviceFloats floats{pass.scheme, pass.n, pass.k, pass.codes, pass.scales, pass.output_factors};
    device::DeviceBuffer rows(test::gpu(), weight.decoded().size() * sizeof(float));
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 128}, {128, 72}}) {
      small_float::dequantize(floats, first, count, {rows.as<float>() + first * size.k, DType::f32, size.k}, stream);
    }
    std::vector<float> got(weight.decoded().size());
    rows.download(std::as_writable_bytes(std::span(got)), stream);
    stream.synchronize();
    const float tolerance = pass.scheme.divisor ? 0x1p-22f : 0.0f;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_LE(std::abs(got[i] - weight.decoded()[i]), tolerance * std::abs(weight.decoded()[i])) << name << " " << i;
    }
  }
}

TEST_F(FloatLinearCuda, BitIdenticalFromRunToRun) {
  const device::Stream stream(test::gpu());
  for (const char* name : {"nvfp4", "fp8-channel"}) {
    const Weight weight(name, {1024, 4096}, 0.02, stream);
    const Activations x(3, 4096, 4096, DType::f16);
    const auto first = test::run_linear(weight.on_device(), weight.decoded(), x, {}, stream).y;
    EXPECT_EQ(test::run_linear(weight.on_device(), weight.decoded(), x, {}, stream).y, first) << name;
  }
}

/// Needs no GPU: the factors of stacked weights stand where their outputs do.
TEST(FloatScalesOfStacks, StandWhereTheirOutputsDo) {
  const auto a = canonical_weight("fp8-block128", {64, 256}, 0.02),
             b = canonical_weight("fp8-block128", {64, 256}, 0.5);
  const PackedWeight* const both[] = {&a, &b};
  const auto scale = [](const PackedWeight& w, size_t i) { return formats::load_scale(w.plane(PlaneRole::scales), i); };
  const FloatScales below = float_scales(both, 0), turned = float_scales(both, 8);
  ASSERT_EQ(below.tile_pairs.size(), 16U);
  EXPECT_TRUE(below.outputs.empty());
  for (size_t tile = 0; tile < 4; ++tile) {
    const size_t at = tile / 2;  // two tiles of a block along k
    EXPECT_EQ(below.tile_pairs[2 * tile], scale(a, at));
    EXPECT_EQ(below.tile_pairs[2 * tile + 1], scale(a, at));
    EXPECT_EQ(below.tile_pairs[8 + 2 * tile], scale(b, at));
    for (const size_t group : {0, 1}) {
      EXPECT_EQ(turned.tile_pairs[8 * group + 2 * tile], scale(a, at));
      EXPECT_EQ(turned.tile_pairs[8 * group + 2 * tile + 1], scale(b, at));
    }
  }
  EXPECT_EQ(below.largest, std::max({scale(a, 0), scale(a, 1), scale(b, 0), scale(b, 1)}));
  const auto c = canonical_weight("nvfp4", {64, 64}, 0.02), d = canonical_weight("nvfp4", {64, 64}, 3.0);
  const PackedWeight* const others[] = {&c, &d};
  const FloatScales factors = float_scales(others, 8);
  ASSERT_EQ(factors.outputs.size(), 128U);
  for (size_t row = 0; row < 128; ++row) {
    EXPECT_EQ(factors.outputs[row], formats::tensor_factor(row / 8 % 2 == 0 ? c : d)) << row;
  }
}

}  // namespace
}  // namespace w4q::kernels
