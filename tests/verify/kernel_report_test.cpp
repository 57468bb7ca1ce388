// The verdict over products that were checked on a GPU.
#include <gtest/gtest.h>

#include <cmath>

#include "verify/products/kernel_check.h"
#include "verify/products/product_reference.h"

namespace w4q::verify {
namespace {

KernelError line(const char* name, double to_cpu, double to_fp64, double bound) {
  return {.name = name, .kernels = "kernel", .to_cpu = to_cpu, .to_fp64 = to_fp64, .bound = bound};
}

/// A rotated product may be off by more than another's bound, and one of integers must not be.
TEST(KernelReport, EveryLayerHasItsOwnBound) {
  KernelReport report{{line("kbit", 4e-4, 5e-4, 1e-3), line("rotated", 1.2e-3, 1.3e-3, 1.5e-3)}};
  EXPECT_TRUE(report.verdict().passed);
  EXPECT_EQ(report.verdict().detail, "0.0013 is at most 0.0015");
  report.layers.push_back(line("int8", 2e-4, 1e-6, 1e-5));
  const Check check = report.verdict();
  EXPECT_FALSE(check.passed);
  EXPECT_EQ(check.detail, "0.0002 is not at most 1e-05");
  ASSERT_EQ(check.faults.size(), 1u);
  EXPECT_EQ(check.faults.front(), "int8: kernel: 2.00e-04, at most 1.00e-05");
}

TEST(KernelReport, ANumberThatIsNoneFails) {
  const KernelReport report{{line("broken", 1e-4, NAN, 1e-3), line("sound", 9e-4, 9e-4, 1e-3)}};
  EXPECT_FALSE(report.verdict().passed);
  EXPECT_EQ(report.verdict().faults.size(), 1u);
}

/// Two weights of 32-bit floats that outlive it.
kernels::LinearWeight dense(const char* name, const std::vector<float>& values, int64_t n, int64_t k) {
  return {name, n, k, kernels::LinearWeight::Dense{{name, DType::f32, {n, k}, bytes_of(values)}, {}}, {}};
}

TEST(ProductReference, PlainOutputsStandSideBySideAndGatedOnesAreOne) {
  const std::vector<float> a{1, 2, 3, 4}, b{0.5f, -1, 2, 0};
  const auto first = dense("a", a, 2, 2), second = dense("b", b, 2, 2);
  const kernels::LinearWeight* const both[] = {&first, &second};
  const std::vector<float> x{1, -1};
  const auto plain = make_references(both, Use::plain, {x.data(), 1, 2}, false);
  ASSERT_EQ(plain.size(), 2u);
  EXPECT_EQ(plain[1].column, 2);
  EXPECT_EQ(plain[0].exact, (std::vector<double>{-1, -1}));
  EXPECT_EQ(plain[1].exact, (std::vector<double>{1.5, 2}));
  const auto gated = make_references(both, Use::gated, {x.data(), 1, 2}, false);
  ASSERT_EQ(gated.size(), 1u);
  EXPECT_DOUBLE_EQ(gated[0].exact[1], -1 / (1 + std::exp(1.0)) * 2);
  const float found[] = {9, 9, -1, -1};
  const int64_t row[] = {1};
  EXPECT_EQ(distances(plain[0], row, found, 2).to_exact, 0);
  const int64_t wrong[] = {0};
  EXPECT_DOUBLE_EQ(distances(plain[0], wrong, found, 2).to_cpu, 10);
}

}  // namespace
}  // namespace w4q::verify
