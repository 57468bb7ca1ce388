// What --kernels says of sound weights in GPU memory, and of broken ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "decoder_cuda/model.h"
#include "device/properties.h"
#include "gpu.h"
#include "packed_model.h"
#include "pipeline/quantize_model.h"
#include "verify/products/kernel_check.h"
#include "verify/products/product_check_cuda.h"
#include "verify/products/product_kernels_cuda.h"

namespace w4q::verify {
namespace {

class KernelCheckGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    set_progress_enabled(false);
  }

  model::Model quantized(const char* scheme, const char* method) {
    pipeline::QuantizeRequest request;
    request.model = test::bundled_model();
    request.output = folder_ / scheme;
    request.method = method;
    request.scheme = formats::parse_scheme(scheme);
    pipeline::quantize_model(request);
    return model::Model::open(request.output);
  }

  test::TemporaryFolder folder_;
};

void expect_passed(const KernelReport& report) {
  const Check check = report.verdict();
  EXPECT_TRUE(check.passed) << (check.faults.empty() ? check.detail : check.faults.front());
}

bool has_line(const KernelReport& report, std::string_view name, std::string_view kernels) {
  return std::ranges::any_of(report.layers, [&](const KernelError& line) {
    return line.name == name && line.kernels.find(kernels) != std::string::npos;
  });
}

TEST_F(KernelCheckGpu, SoundKernelsStayWithinTheirBounds) {
  expect_passed(check_kernels(test::gpu(), model::Model::open(test::bundled_model())));
  const auto kbit = check_kernels(test::gpu(), quantized("kbit3-b32-e4m4", "kbit"));
  expect_passed(kbit);
  for (const auto& line : kbit.layers)
    EXPECT_EQ(line.bound, line.name.find(" and ") == std::string::npos ? 1e-3 : 2e-3);
  EXPECT_TRUE(has_line(kbit, "model.layers.1.self_attn.v_proj", "kbit-gemv, "));
  EXPECT_TRUE(has_line(kbit, "model.layers.2.mlp.gate_proj and up_proj", ", fused"));
  EXPECT_TRUE(has_line(kbit, "model.layers.3.mlp.down_proj", ", fused"));
  const auto rotated = check_kernels(test::gpu(), quantized("rotated4-d128", "rotated"));
  expect_passed(rotated);
  EXPECT_EQ(rotated.layers.front().bound, 1.5e-3);
}

TEST_F(KernelCheckGpu, ProductsWithInt8ActivationsHaveABoundOfTheirOwn) {
  const auto report = check_kernels(test::gpu(), quantized("int4-g128-f16", "rtn"), true);
  expect_passed(report);
  const auto int8 = std::ranges::find_if(report.layers, [](const KernelError& line) { return line.rounding > 0; });
  ASSERT_NE(int8, report.layers.end());
  EXPECT_EQ(int8->bound, 1e-5);
  EXPECT_EQ(int8->kernels, "marlin-int8");
}

/// Every range of rows of every kernel is entered and left.
TEST_F(KernelCheckGpu, RowCountsAreThoseOfTheKernels) {
  const auto model = quantized("kbit4-b32-e4m4", "kbit");
  const device::Stream stream(test::gpu());
  const auto layer = decoder_cuda::upload_layer(model.layers().front(), stream);
  const auto& linear = layer.blocks.front().groups.back();
  const auto counts = row_counts(linear, false);
  const auto& product = linear.products.front();
  std::vector<std::string> seen, all;
  for (int64_t rows = 1; rows <= 2048; ++rows) all.push_back(kernel_names(product, rows, false).front());
  for (const int64_t rows : counts) seen.push_back(all[static_cast<size_t>(rows - 1)]);
  for (const auto& name : all) EXPECT_NE(std::ranges::find(seen, name), seen.end()) << name;
}

/// Zeros over the first kilobyte of codes: some outputs of one weight of thousands.
TEST_F(KernelCheckGpu, ADamagedWeightOnTheDeviceIsFound) {
  const auto model = quantized("kbit4-b32-e4m4", "kbit");
  const device::Stream stream(test::gpu());
  auto layer = decoder_cuda::upload_layer(model.layers().front(), stream);
  auto& linear = layer.blocks.front().groups.back();
  const auto* const weight = &model.layers().front().linear(model::Role::output);
  const auto check = [&] { return KernelReport{check_product(test::gpu(), {linear, {weight}, Use::residual}, false)}; };
  expect_passed(check());
  const auto* const codes = reinterpret_cast<const std::byte*>(linear.products.front().linear.passes.front().codes);
  const auto plane = std::ranges::find_if(linear.memory, [&](const auto& buffer) { return buffer.data() == codes; });
  ASSERT_NE(plane, linear.memory.end());
  const std::vector<std::byte> zeros(1024);
  plane->upload(zeros, stream);
  stream.synchronize();
  const Check broken = check().verdict();
  EXPECT_FALSE(broken.passed);
  ASSERT_EQ(broken.faults.size(), 1u);
  EXPECT_TRUE(broken.faults.front().starts_with("model.layers.0.self_attn.o_proj: kbit-gemv")) << broken.faults.front();
}

/// The weight of another layer in its place: what a wrong upload would give.
TEST_F(KernelCheckGpu, AnotherWeightIsNotTheSame) {
  const auto model = model::Model::open(test::bundled_model());
  const device::Stream stream(test::gpu());
  const auto layer = decoder_cuda::upload_layer(model.layers().front(), stream);
  const auto* const other = &model.layers().back().linear(model::Role::down);
  const KernelReport report{
      check_product(test::gpu(), {layer.blocks.back().groups.back(), {other}, Use::residual}, false)};
  EXPECT_FALSE(report.verdict().passed);
}

}  // namespace
}  // namespace w4q::verify
