// Weights that the GPU rounds to f16: the bits of the CPU, and the first of those that do not fit.
#include "kernels/elementwise/narrow_cuda.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "core/convert.h"
#include "core/rng.h"
#include "device/buffer.h"
#include "device/copy.h"
#include "device/properties.h"
#include "gpu.h"

namespace w4q::kernels {
namespace {

class NarrowCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

struct Narrowed {
  std::vector<uint16_t> halves;
  unsigned long long stray;
};

/// `at`: where f16 begins in its memory.
Narrowed narrowed(std::span<const std::byte> bytes, DType type, int64_t first = 0, size_t at = 0) {
  const device::Stream stream(test::gpu());
  const auto from = device::DeviceBuffer::copy_of(bytes, stream);
  const size_t count = bytes.size() * 8 / static_cast<size_t>(dtype_bits(type));
  device::DeviceBuffer to(test::gpu(), (count + at) * 2), stray(test::gpu(), sizeof(unsigned long long));
  stray.fill(0xFF, stream);
  narrow_cuda(from.data(), type, static_cast<int64_t>(count), to.as<__half>() + at, stray.as<unsigned long long>(),
              first, stream);
  Narrowed result{std::vector<uint16_t>(count), 0};
  device::copy(device::Way::from_gpu, result.halves.data(), to.as<__half>() + at, count * 2, stream, "reading halves");
  stray.download(std::as_writable_bytes(std::span(&result.stray, 1)), stream);
  stream.synchronize();
  return result;
}

void expect_bits(std::span<const std::byte> bytes, DType type, const std::vector<float>& values) {
  std::vector<uint16_t> expected(values.size());
  narrow(values, DType::f16, std::as_writable_bytes(std::span(expected)));
  const Narrowed got = narrowed(bytes, type);
  EXPECT_EQ(got.halves, expected) << dtype_name(type);
  EXPECT_EQ(got.stray, ~0ULL) << dtype_name(type);
  EXPECT_EQ(narrowed(bytes, type, 0, 3).halves, expected) << dtype_name(type) << ", unaligned";
}

TEST_F(NarrowCuda, GivesTheBitsOfTheCpu) {
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<uint16_t> bits;
    std::vector<float> values;
    for (uint32_t code = 0; code < 0x10000; ++code) {
      float value = 0;
      const auto half = static_cast<uint16_t>(code);
      widen(std::as_bytes(std::span(&half, 1)), type, {&value, 1});
      if (!(std::abs(value) <= 65504.0f)) continue;
      bits.push_back(half);
      values.push_back(value);
    }
    expect_bits(std::as_bytes(std::span(bits)), type, values);
  }
  std::vector<float> values;
  for (uint64_t i = 0; values.size() < 300'001; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random_bits(5, i)));
    if (std::abs(value) <= 65504.0f) values.push_back(value);
  }
  expect_bits(std::as_bytes(std::span(values)), DType::f32, values);
}

TEST_F(NarrowCuda, SaysWhichIsTheFirstThatDoesNotFit) {
  for (const float bad : {65520.0f, 65504.004f, -1e30f, INFINITY, NAN}) {
    std::vector<float> values(10'003, 1.0f);
    values[10'002] = bad;
    EXPECT_EQ(narrowed(std::as_bytes(std::span(values)), DType::f32, 100).stray, 10'102u) << bad;
    values[4097] = values[8000] = bad;
    EXPECT_EQ(narrowed(std::as_bytes(std::span(values)), DType::f32).stray, 4097u) << bad;
  }
}

}  // namespace
}  // namespace w4q::kernels
