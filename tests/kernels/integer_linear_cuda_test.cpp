// The GPU's integer linear layers against an fp64 product of the decoded weights.
#include <cmath>

#include "device/cublas.h"
#include "device/properties.h"
#include "fused_linear_check.h"
#include "gpu.h"
#include "integer_weight.h"
#include "linear_cuda_check.h"

namespace w4q::kernels {
namespace {

using formats::Scheme;
using test::Activations;
using Size = test::IntegerSize;
using Weight = test::IntegerWeight;
using test::linear_bound;

class IntegerLinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }

  static void check(std::string_view scheme_name, std::string_view layout, Size size, std::span<const int64_t> rows) {
    const device::Stream stream(test::gpu());
    const Scheme scheme = formats::parse_scheme(scheme_name);
    const Weight weight(scheme, size, layout, stream);
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const int64_t m : rows) {
        const Activations x(m, size.k, size.k, dtype);
        for (const KernelRow* kernel : test::accepting_kernels(weight.on_device(), m, dtype)) {
          const auto outcome =
              test::run_linear(weight.on_device(), weight.decoded(), x, {.bias = {}, .kernel = kernel}, stream);
          ASSERT_LE(outcome.relative_error, linear_bound(dtype, size.n * size.k))
              << kernel->name << ": " << scheme_name << " " << layout << " " << size.n << " × " << size.k << ", " << m
              << " rows, " << dtype_name(dtype);
        }
      }
    }
  }
};

constexpr int64_t all_rows[] = {1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 200};
constexpr Size ragged[] = {{64, 64}, {1, 1}, {3, 31}, {65, 33}, {100, 96}, {128, 1408}, {257, 2097}, {1000, 520}};

TEST_F(IntegerLinearCuda, MarlinWordsOverRaggedShapes) {
  for (const std::string_view scheme :
       {"int4-g128-f16", "int4-g32-f16", "int4-g64-bf16", "int4-row-f16", "int4-g128-f16-asym", "int4-row-f16-asym",
        "int8-g128-f16", "int8-row-bf16", "int8-g64-f16-asym"}) {
    for (const Size size : ragged) check(scheme, "marlin", size, all_rows);
  }
}

TEST_F(IntegerLinearCuda, MarlinWordsWithActOrder) {
  for (const std::string_view scheme :
       {"int4-g128-f16-actorder", "int8-g32-f16-actorder", "int4-g64-f16-asym-actorder"}) {
    for (const Size size : {Size{64, 128}, {100, 300}, {257, 2097}}) check(scheme, "marlin", size, all_rows);
  }
}

TEST_F(IntegerLinearCuda, InterleavedWordsOverRaggedShapes) {
  constexpr int64_t rows[] = {1, 2, 3, 4, 5, 8, 9, 64, 130};
  for (const std::string_view scheme : {"int4-g32-f16", "int4-g64-f16", "int4-g32-f16-asym", "int4-g128-f16-asym"}) {
    for (const Size size : ragged) check(scheme, "interleaved", size, rows);
  }
}

TEST_F(IntegerLinearCuda, ModelShapes) {
  constexpr int64_t rows[] = {1, 8, 64, 130};
  for (const Size size : {Size{4096, 4096}, {4096, 14336}}) {
    check("int4-g128-f16", "marlin", size, rows);
    check("int4-g32-f16", "interleaved", size, std::span(rows).first(2));
  }
  constexpr int64_t shared_in_two_rounds[] = {17};
  check("int4-g128-f16", "marlin", {22016, 4096}, shared_in_two_rounds);
}

TEST_F(IntegerLinearCuda, BiasStrideResidualTypeAndUnalignedRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {1, 5, 20, 64, 130};
  for (const auto& [scheme, layout, size] : {std::tuple{"int4-g64-f16-asym", "marlin", Size{300, 200}},
                                             {"int4-g128-f16", "marlin", Size{320, 200}},
                                             {"int4-g32-f16", "interleaved", Size{300, 200}}}) {
    SCOPED_TRACE(concat(scheme, " ", layout));
    const Weight weight(formats::parse_scheme(scheme), size, layout, stream);
    test::check_every_form(weight.on_device(), weight.decoded(), rows, stream);
  }
}

TEST_F(IntegerLinearCuda, SiluIsPartOfProductsOfManyRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {17, 33, 128};
  for (const auto& [scheme, size] : {std::pair{"int4-g128-f16", Size{256, 2048}},
                                     {"int4-g128-f16", Size{8192, 256}},
                                     {"int4-row-f16", Size{34048, 64}},
                                     {"int4-g64-f16-asym", Size{1024, 512}},
                                     {"int8-g128-f16", Size{512, 512}}}) {
    SCOPED_TRACE(scheme);
    const Weight weight(formats::parse_scheme(scheme), size, "marlin", stream);
    test::check_gated_rows(weight.on_device(), weight.decoded(), rows, stream);
  }
}

TEST_F(IntegerLinearCuda, NormsAndSiluArePartOfProducts) {
  const device::Stream stream(test::gpu());
  for (const auto& [name, layout] : {std::pair{"int4-g128-f16", "marlin"},
                                     {"int4-g32-f16-asym", "marlin"},
                                     {"int4-row-f16", "marlin"},
                                     {"int8-g128-f16", "marlin"},
                                     {"int4-g32-f16", "interleaved"},
                                     {"int4-g128-f16-asym", "interleaved"}}) {
    SCOPED_TRACE(concat(name, " ", layout));
    const Scheme scheme = formats::parse_scheme(name);
    // Rows of one warp, of several, of several blocks; a last group that is not full.
    for (const auto& [hidden, inputs, outputs] :
         {std::array<int64_t, 3>{64, 64, 64}, {200, 500, 320}, {1024, 4096, 640}}) {
      const Weight first(scheme, {hidden, inputs}, layout, stream);
      const Weight second(scheme, {outputs, hidden}, layout, stream);
      test::check_fused_chain({first.on_device(), first.decoded()}, {second.on_device(), second.decoded()}, stream);
    }
  }
}

TEST_F(IntegerLinearCuda, BitIdenticalFromRunToRun) {
  const device::Stream stream(test::gpu());
  const Size size{6144, 4096};
  for (const auto& [scheme, layout] : {std::pair{"int4-g128-f16", "marlin"}, {"int4-g32-f16", "interleaved"}}) {
    const Weight weight(formats::parse_scheme(scheme), size, layout, stream);
    for (const int64_t m : {1, 8, 16, 40}) {
      const Activations x(m, size.k, size.k, DType::f16);
      const auto first = test::run_linear(weight.on_device(), weight.decoded(), x, {}, stream).y;
      for (int repeat = 0; repeat < 2; ++repeat) {
        EXPECT_EQ(test::run_linear(weight.on_device(), weight.decoded(), x, {}, stream).y, first);
      }
    }
  }
}

TEST_F(IntegerLinearCuda, OverlappingLaunchesReadWhatTheOneBeforeWrote) {
  const device::Stream stream(test::gpu());
  constexpr int64_t size = 2048;
  for (const auto& [scheme, layout] : {std::pair{"int4-g128-f16", "marlin"},
                                       {"int4-g128-f16-actorder", "marlin"},
                                       {"int4-g128-f16-asym", "marlin"},
                                       {"int8-g128-f16", "marlin"},
                                       {"int4-g32-f16", "interleaved"}}) {
    const Scheme parsed = formats::parse_scheme(scheme);
    auto canonical = test::sample_integer(parsed, size, size, 11);
    // Codes are uniform: rows of weights have a length of 1. Those of symmetric ones have a mean of −½, by which a vector
    // of equal values would become five times as long with each layer; it has no such part if every other row is negative.
    const double scale = std::sqrt(12.0 / size) / (1 << parsed.bits);
    const uint16_t positive = f16_from_f32(static_cast<float>(scale));
    const uint16_t negative = f16_from_f32(static_cast<float>(-scale));
    const auto scales = canonical.plane(formats::PlaneRole::scales).bytes.as<uint16_t>();
    const size_t groups = scales.size() / size;
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = i / groups % 2 == 0 ? positive : negative;
    SCOPED_TRACE(scheme);
    test::check_overlapping_chain(Weight(canonical, layout, stream).on_device(), stream);
  }
}

TEST_F(IntegerLinearCuda, KernelsTakeTurnsOnOneWorkspace) {
  const device::Stream stream(test::gpu());
  const Size size{1000, 2048};
  for (const std::string_view scheme : {"int4-g128-f16", "int4-g128-f16-actorder"}) {
    const Weight weight(formats::parse_scheme(scheme), size, "marlin", stream);
    test::TestWorkspace workspace(DeviceLinear{.passes = {weight.on_device()}}, 64, stream);
    for (const int64_t m : {64, 1, 12, 40, 8, 16, 30, 1}) {
      const Activations x(m, size.k, size.k, DType::f16);
      const auto alone = test::run_linear(weight.on_device(), weight.decoded(), x, {}, stream).y;
      EXPECT_EQ(
          test::run_linear(weight.on_device(), weight.decoded(), x, {.bias = {}, .workspace = &workspace}, stream).y,
          alone)
          << scheme << ", " << m << " rows";
    }
  }
}

TEST_F(IntegerLinearCuda, OneTableChoosesTheKernel) {
  const auto chosen = [](std::string_view scheme, std::string_view layout, int64_t m) {
    const DevicePass pass{.scheme = formats::parse_scheme(scheme), .layout = layout, .n = 4096, .k = 4096};
    return pick_kernel({.gpu = test::gpu().properties(), .passes = {&pass, 1}, .m = m}).name;
  };
  EXPECT_EQ(chosen("int4-g128-f16", "marlin", 1), "marlin-gemv");
  EXPECT_EQ(chosen("int4-g128-f16", "marlin", 8), "marlin-gemv");
  EXPECT_EQ(chosen("int8-row-bf16", "marlin", 16), "marlin-gemv");
  const bool warpgroups = chosen("int4-g128-f16", "marlin", 17) == "marlin-wgmma";  // a build for sm_90 on one
  EXPECT_EQ(chosen("int4-g128-f16", "marlin", 9), warpgroups ? "marlin-wgmma" : "marlin-gemv");
  EXPECT_EQ(chosen("int4-g128-f16-asym", "marlin", 17), "marlin-gemm");
  EXPECT_EQ(chosen("int4-g32-f16", "interleaved", 8), "interleaved-gemv");
  EXPECT_EQ(chosen("int4-g32-f16", "interleaved", 65), device::have_cublas() ? "interleaved-wide" : "interleaved-gemv");
  test::expect_error(ErrorCode::unsupported, {"int4-g32-f16", "gptq", "marlin-gemv reads marlin"},
                     [&] { chosen("int4-g32-f16", "gptq", 1); });
}

TEST_F(IntegerLinearCuda, RefusesBadArgumentsBeforeAnyLaunch) {
  const device::Stream stream(test::gpu());
  const Size size{64, 128};
  const Weight weight(formats::parse_scheme("int4-g32-f16-asym-actorder"), size, "marlin", stream);
  device::DeviceBuffer x(test::gpu(), 128 * 2), y(test::gpu(), 64 * 2);
  const test::BadArguments bad(weight.on_device(), x, y, stream);
  bad.refuse("null", [](auto& a) { a.pass().zeros = nullptr; });
  bad.refuse("null", [](auto& a) { a.pass().input_order = nullptr; });
  bad.refuse("misaligned", [](auto& a) { a.pass().codes = a.pass().codes + 1; });
  bad.refuse("stride", [](auto& a) { a.call.ldx = 127; });
  bad.refuse("workspace", [](auto& a) { a.workspace.sizes.semaphores = 15; });
  bad.take();
  stream.synchronize();
}

}  // namespace
}  // namespace w4q::kernels
