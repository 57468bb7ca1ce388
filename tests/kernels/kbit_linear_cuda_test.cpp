// The GPU's kbit linear layer against an fp64 product of the decoded weights.
#include <cmath>
#include <vector>

#include "device/cublas.h"
#include "device/properties.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "fused_linear_check.h"
#include "gpu.h"
#include "kbit_weight.h"
#include "linear_cuda_check.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;
using formats::SchemeFamily;
using test::Activations;

using Size = test::WeightSize;
using Weight = test::KbitWeight;

test::LinearOutcome run(const Weight& weight, Size, const Activations& x, const std::vector<float>& bias,
                        const device::Stream& stream) {
  return test::run_linear(weight.on_device(), weight.decoded(), x, {bias}, stream);
}

double bound(DType dtype) { return test::linear_bound(dtype, 1000); }

class KbitLinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_F(KbitLinearCuda, EveryWidthTypeAndRowCountOverRaggedShapes) {
  const device::Stream stream(test::gpu());
  for (const auto [n, k] :
       {Size{64, 64}, {1, 1}, {3, 31}, {65, 33}, {100, 96}, {128, 1408}, {257, 4097}, {1000, 520}}) {
    for (int bits = 2; bits <= 5; ++bits) {
      for (const ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
        const Scheme scheme{SchemeFamily::kbit, bits, 32, scale};
        const Weight weight(scheme, {n, k}, 0.05, stream);
        for (const DType dtype : {DType::f16, DType::bf16}) {
          for (const int64_t m : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64}) {
            const Activations x(m, k, k, dtype);
            for (const KernelRow* kernel : test::accepting_kernels(weight.on_device(), m, dtype)) {
              const auto outcome =
                  test::run_linear(weight.on_device(), weight.decoded(), x, {.bias = {}, .kernel = kernel}, stream);
              // A single weight or a few have the worst case of one rounding each instead of their mean.
              ASSERT_LE(outcome.relative_error, test::linear_bound(dtype, n * k))
                  << kernel->name << ": " << formats::to_string(scheme) << " " << n << " × " << k << ", " << m
                  << " rows, " << dtype_name(dtype);
            }
          }
        }
      }
    }
  }
}

TEST_F(KbitLinearCuda, ManyRowsByDecodingOnce) {
  const device::Stream stream(test::gpu());
  for (const auto [n, k] : {Size{1, 1}, {100, 96}, {257, 4097}, {1000, 520}}) {
    for (int bits = 2; bits <= 5; ++bits) {
      const Weight weight({SchemeFamily::kbit, bits, 32, ScaleType::e4m4}, {n, k}, 0.05, stream);
      std::vector<float> bias(static_cast<size_t>(n), 0.5f);
      for (const DType dtype : {DType::f16, DType::bf16}) {
        for (const int64_t m : {65, 129, 200}) {
          const auto outcome =
              run(weight, {n, k}, Activations(m, k, k, dtype), m != 200 ? bias : std::vector<float>{}, stream);
          const double limit = n * k < 1000 ? 4 * bound(dtype) : bound(dtype);
          ASSERT_LE(outcome.relative_error, limit) << bits << " bits, " << n << " × " << k << ", " << m << " rows";
        }
      }
    }
  }
}

TEST_F(KbitLinearCuda, TheReferenceKernelReadsTheTilesOfTheInterchangeLayout) {
  const device::Stream stream(test::gpu());
  for (const auto [n, k] : {Size{1, 1}, {100, 96}, {257, 4097}, {1000, 520}}) {
    for (int bits = 2; bits <= 5; ++bits) {
      for (const ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
        const Weight weight({SchemeFamily::kbit, bits, 32, scale}, {n, k}, 0.05, stream, "kbit-tile");
        for (const DType dtype : {DType::f16, DType::bf16}) {
          for (const int64_t m : {1, 17, 64}) {
            const auto outcome = run(weight, {n, k}, Activations(m, k, k, dtype), {}, stream);
            const double limit = n * k < 1000 ? 4 * bound(dtype) : bound(dtype);
            ASSERT_LE(outcome.relative_error, limit) << bits << " bits, " << n << " × " << k << ", " << m << " rows";
          }
        }
      }
    }
  }
}

TEST_F(KbitLinearCuda, OneTableChoosesTheKernel) {
  const auto chosen = [](std::string_view layout, int64_t m) {
    const DevicePass pass{.scheme = formats::parse_scheme("kbit4-b32-e4m4"), .layout = layout, .n = 4096, .k = 4096};
    return pick_kernel({.gpu = test::gpu().properties(), .passes = {&pass, 1}, .m = m}).name;
  };
  EXPECT_EQ(chosen("kbit-fragment", 1), "kbit-gemv");
  EXPECT_EQ(chosen("kbit-fragment", 16), "kbit-gemv");
  const bool warpgroups = chosen("kbit-fragment", 17) == "kbit-wgmma";  // a build for sm_90 on one
  EXPECT_EQ(chosen("kbit-fragment", 17), warpgroups ? "kbit-wgmma" : "kbit-gemm");
  EXPECT_EQ(chosen("kbit-fragment", 128), warpgroups ? "kbit-wgmma" : "kbit-gemm");
  const std::string_view wide = device::have_cublas() ? "kbit-wide" : "kbit-gemm";
  EXPECT_EQ(chosen("kbit-fragment", 129), warpgroups ? "kbit-wgmma" : wide);
  EXPECT_EQ(chosen("kbit-fragment", 2000), warpgroups && !device::have_cublas() ? "kbit-wgmma" : wide);
  EXPECT_EQ(chosen("kbit-tile", 1), "kbit-reference");
  test::expect_error(ErrorCode::unsupported, {"kbit4-b32-e4m4", "canonical", "kbit-gemv reads kbit-fragment"},
                     [&] { chosen("canonical", 1); });
}

TEST_F(KbitLinearCuda, ModelShapes) {
  const device::Stream stream(test::gpu());
  for (const auto [n, k] : {Size{4096, 4096}, {6144, 4096}, {14336, 4096}, {4096, 14336}}) {
    for (int bits = 2; bits <= 5; ++bits) {
      const Scheme scheme{SchemeFamily::kbit, bits, 32, ScaleType::e4m4};
      const Weight weight(scheme, {n, k}, 0.02, stream);
      for (const int64_t m : {1, 8, 64}) {
        const auto outcome = run(weight, {n, k}, Activations(m, k, k, DType::f16), {}, stream);
        EXPECT_LE(outcome.relative_error, bound(DType::f16))
            << formats::to_string(scheme) << " " << n << " × " << k << ", " << m;
        RecordProperty(
            formats::to_string(scheme) + "_" + std::to_string(n) + "x" + std::to_string(k) + "_" + std::to_string(m),
            std::to_string(outcome.relative_error));
      }
    }
  }
}

TEST_F(KbitLinearCuda, BiasStrideResidualTypeAndUnalignedRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {1, 5, 20, 130};
  for (const Size size : {Size{300, 200}, {320, 200}}) {
    const Weight weight({SchemeFamily::kbit, 3, 32, ScaleType::e4m4}, size, 0.05, stream);
    test::check_every_form(weight.on_device(), weight.decoded(), rows, stream);
  }
}

TEST_F(KbitLinearCuda, AnyMagnitudeOfWeights) {
  const device::Stream stream(test::gpu());
  const Size size{256, 512};
  for (const double magnitude : {1e-6, 1e-3, 30.0, 2000.0}) {
    for (const ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
      const Weight weight({SchemeFamily::kbit, 4, 32, scale}, size, magnitude, stream);
      const auto outcome = run(weight, size, Activations(4, size.k, size.k, DType::bf16), {}, stream);
      EXPECT_LE(outcome.relative_error, bound(DType::bf16)) << magnitude << " " << formats::to_string(scale);
    }
  }
}

TEST_F(KbitLinearCuda, NormsAndSiluArePartOfProducts) {
  const device::Stream stream(test::gpu());
  for (const char* name : {"kbit2-b32-e4m4", "kbit3-b32-e4m4", "kbit4-b32-f16", "kbit5-b32-e4m4"}) {
    SCOPED_TRACE(name);
    const Scheme scheme = formats::parse_scheme(name);
    // Rows of one warp, of several, of several blocks; a last group that is not full.
    for (const auto& [hidden, inputs, outputs] :
         {std::array<int64_t, 3>{64, 64, 64}, {200, 500, 320}, {1024, 4096, 640}}) {
      const Weight first(scheme, {hidden, inputs}, 0.05, stream);
      const Weight second(scheme, {outputs, hidden}, 0.05, stream);
      test::check_fused_chain({first.on_device(), first.decoded()}, {second.on_device(), second.decoded()}, stream);
    }
  }
}

/// One row leaves nothing but the roundings of the table: scales multiply fp32 sums.
TEST_F(KbitLinearCuda, StretchedTablesAreNearerToF16) {
  const device::Stream stream(test::gpu());
  const Size size{256, 1024};
  const Activations x(1, size.k, size.k, DType::f16);
  test::LinearExtras extras;
  extras.fp32 = true;
  // The tables alone: 2.5 and 28 times; sums round, too.
  for (const auto& [name, times] : {std::pair{"kbit4-b32-e4m4", 2.0}, {"kbit3-b32-e4m4", 10.0}}) {
    const Weight weight(formats::parse_scheme(name), size, 0.05, stream);
    const auto plain = test::run_linear(weight.without_stretch(), weight.decoded(), x, extras, stream);
    const auto stretched = test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream);
    EXPECT_LE(stretched.relative_error * times, plain.relative_error) << name;
    RecordProperty(name, concat(plain.relative_error, " to ", stretched.relative_error));
  }
}

/// More rows leave the roundings of weights that are scaled in registers.
TEST_F(KbitLinearCuda, StretchedProductsAreNearerToF16) {
  const device::Stream stream(test::gpu());
  const Size size{256, 1024};
  test::LinearExtras extras;
  extras.fp32 = true;
  for (const int64_t rows : {17, 64, 128, 250}) {
    const Activations x(rows, size.k, size.k, DType::f16);
    // Measured 1.3 and 1.9 times.
    for (const auto& [name, times] : {std::pair{"kbit4-b32-e4m4", 1.1}, {"kbit3-b32-e4m4", 1.7}}) {
      const Weight weight(formats::parse_scheme(name), size, 0.05, stream);
      const auto plain = test::run_linear(weight.without_stretch(), weight.decoded(), x, extras, stream);
      const auto stretched = test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream);
      EXPECT_LE(stretched.relative_error * times, plain.relative_error) << name << ", " << rows << " rows";
      RecordProperty(concat(name, ", ", rows), concat(plain.relative_error, " to ", stretched.relative_error));
    }
  }
}

TEST_F(KbitLinearCuda, SiluIsPartOfProductsOfManyRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {17, 40, 100, 128, 250};
  // Jobs that many blocks share, that two share, and jobs of one block.
  for (const Size size : {Size{256, 2048}, {8192, 256}, {34048, 64}}) {
    const Weight weight(formats::parse_scheme("kbit4-b32-e4m4"), size, 0.05, stream);
    test::check_gated_rows(weight.on_device(), weight.decoded(), rows, stream);
  }
}

TEST_F(KbitLinearCuda, RefusesToFuseWhatItCannot) {
  const device::Stream stream(test::gpu());
  const Weight weight(formats::parse_scheme("kbit4-b32-e4m4"), {96, 64}, 0.05, stream);
  device::DeviceBuffer memory(test::gpu(), 1 << 20);
  const test::BadArguments bad(weight.on_device(), memory, memory, stream);
  bad.refuse("a gated product", [](auto& a) { a.call.fusion.swiglu = true; });
  bad.refuse("a fused product of 2 rows", [&](auto& a) {
    a.call.fusion = {.input_norm = memory.as<float>()};
    a.call.m = 2;
  });
  bad.refuse("a gated product", [&](auto& a) {
    a.call.m = 17;  // silu alone
    a.call.residual = memory.data();
    a.call.fusion = {.swiglu = true};
  });
  bad.refuse("a fused product of 16 rows", [](auto& a) {
    a.call.m = 16;
    a.call.fusion = {.swiglu = true};
  });
  bad.refuse("leaves the next one's input", [&](auto& a) {
    a.call.fp32 = true;
    a.call.fusion = {.next_x = memory.data()};
  });
}

TEST_F(KbitLinearCuda, BitIdenticalFromRunToRun) {
  const device::Stream stream(test::gpu());
  const Size size{6144, 4096};
  const Weight weight({SchemeFamily::kbit, 4, 32, ScaleType::e4m4}, size, 0.02, stream);
  const Activations x(3, size.k, size.k, DType::f16);
  const auto first = run(weight, size, x, {}, stream).y;
  for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(run(weight, size, x, {}, stream).y, first);
}

TEST_F(KbitLinearCuda, OverlappingLaunchesReadWhatTheOneBeforeWrote) {
  const device::Stream stream(test::gpu());
  // Scaled so that values neither grow nor vanish along the chain.
  const Weight weight({SchemeFamily::kbit, 4, 32, ScaleType::e4m4}, {2048, 2048}, 1 / std::sqrt(2048.0), stream);
  test::check_overlapping_chain(weight.on_device(), stream);
}

TEST_F(KbitLinearCuda, RefusesBadArgumentsBeforeAnyLaunch) {
  const device::Stream stream(test::gpu());
  const Size size{64, 64};
  const Weight weight({SchemeFamily::kbit, 4, 32, ScaleType::e4m4}, size, 0.05, stream);
  device::DeviceBuffer x(test::gpu(), 65 * 64 * 2), y(test::gpu(), 65 * 64 * 2);
  const test::BadArguments bad(weight.on_device(), x, y, stream);
  bad.refuse("rows", [](auto& a) { a.call.m = 0; });
  bad.refuse("rows", [](auto& a) { a.call.m = (int64_t{1} << 30) + 1; });
  bad.refuse("activations", [](auto& a) { a.call.activation = DType::f32; });
  bad.refuse("null", [](auto& a) { a.call.x = nullptr; });
  bad.refuse("null", [](auto& a) { a.pass().codes = nullptr; });
  bad.refuse("misaligned", [](auto& a) { a.pass().codes = a.pass().codes + 1; });
  bad.refuse("stride", [](auto& a) { a.call.ldx = 63; });
  bad.refuse("workspace", [](auto& a) { a.workspace.sizes.semaphores = 15; });
  bad.refuse("workspace", [](auto& a) { a.workspace.semaphores = nullptr; });
  bad.refuse("weight of", [](auto& a) { a.pass().n = 0; });
  bad.refuse("table_max", [](auto& a) { a.pass().table_max = 0; });
  bad.refuse("table_stretch", [](auto& a) { a.pass().table_stretch = 2; });
  bad.refuse("product_stretch", [](auto& a) { a.pass().product_stretch = 0.5f; });
  bad.refuse("does not take", [](auto& a) { a.pass().layout = "marlin"; });
  bad.take();
  stream.synchronize();
}

}  // namespace
}  // namespace w4q::kernels
