// The GPU decoder against the reference decoder: f32 bit for bit, 16-bit types one rounding of it (class E1).
#include "kernels/dequantize/dequantize_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/convert.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/properties.h"
#include "device/stream.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "gpu.h"
#include "kbit_samples.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

constexpr auto poison = std::byte{0xA5};

/// Random codes with zeroed padding, every scale of the type in turn, and a table with a factor.
PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k, int exponent) {
  const auto specs = formats::scheme_row(formats::SchemeFamily::kbit).planes(scheme, n, k);
  PackedWeight weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k, specs);
  const int64_t blocks = formats::kbit_blocks(k);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (size_t i = 0; i < words.size(); ++i) {
    const int64_t block = static_cast<int64_t>(i) / scheme.bits % blocks;
    words[i] = static_cast<uint32_t>(random_bits(1, i)) & formats::kbit_lane_mask(k, block);
  }
  auto& scales = weight.plane(PlaneRole::scales).bytes;
  if (scheme.scale == ScaleType::e4m4) {
    for (size_t i = 0; i < scales.size(); ++i) scales.as<uint8_t>()[i] = static_cast<uint8_t>(i * 37);
  } else {
    for (size_t i = 0; i < scales.size() / 2; ++i) {
      scales.as<uint16_t>()[i] = static_cast<uint16_t>(i < 64 ? i * 487 : random_bits(2, i) % 0x7C00);
    }
  }
  const auto table = formats::kbit_scaled_codebook(formats::codebook("nf", scheme.bits), exponent);
  std::ranges::copy(table, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  return weight;
}

class DequantizeCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }

  /// Decodes on the GPU into poisoned rows `offset` elements behind an aligned address and compares every byte: values,
  /// gaps between rows, and what stands before and behind.
  static void check(const PackedWeight& canonical, std::string_view layout, DType dtype, int64_t stride,
                    int64_t offset) {
    const std::string what = concat(to_string(canonical.scheme), " ", layout, " to ", dtype_name(dtype), " ",
                                    canonical.n, " × ", canonical.k, " stride ", stride, " offset ", offset);
    const PackedWeight packed = repack::layout_row(layout).pack(canonical);
    const auto element = static_cast<size_t>(dtype_bits(dtype) / 8);
    const size_t size = static_cast<size_t>(offset + canonical.n * stride + 16) * element;
    std::vector<std::byte> expected(size, poison);
    const std::vector<float> values = test::decode(canonical);
    for (int64_t row = 0; row < canonical.n; ++row) {
      const auto from =
          std::span(values).subspan(static_cast<size_t>(row * canonical.k), static_cast<size_t>(canonical.k));
      narrow(from, dtype,
             std::span(expected).subspan(static_cast<size_t>(offset + row * stride) * element, from.size() * element));
    }
    const device::Stream stream(test::gpu());
    const auto upload = [&](PlaneRole role) {
      return device::DeviceBuffer::copy_of(packed.plane(role).bytes.bytes(), stream);
    };
    const auto codes = upload(PlaneRole::codes);
    const auto scales = upload(PlaneRole::scales);
    const auto codebook = upload(PlaneRole::codebook);
    device::DeviceBuffer out(test::gpu(), size);
    out.fill(std::to_integer<int>(poison), stream);
    dequantize_cuda(
        {packed.scheme, packed.layout, packed.n, packed.k, codes.as<uint32_t>(), scales.data(), codebook.as<float>()},
        {out.data() + static_cast<size_t>(offset) * element, dtype, stride}, stream);
    std::vector<std::byte> got(size);
    out.download(got, stream);
    stream.synchronize();
    const auto differ = std::ranges::mismatch(got, expected);
    EXPECT_TRUE(differ.in1 == got.end()) << what << ": differs at element "
                                         << (differ.in1 - got.begin()) / static_cast<int64_t>(element) - offset;
  }

  template <class Body>
  static void for_each_case(const Body& body) {
    for (const auto& scheme : formats::scheme_row(formats::SchemeFamily::kbit).schemes()) {
      for (const std::string_view layout : {"canonical", "kbit-tile", "kbit-fragment"}) {
        for (DType dtype : {DType::f32, DType::f16, DType::bf16}) body(scheme, layout, dtype);
      }
    }
  }
};

TEST_F(DequantizeCuda, EqualsTheReferenceForEveryShape) {
  constexpr std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {3, 31},    {5, 33},     {64, 95},
                                                    {9, 256}, {17, 1024}, {128, 1408}, {2, 4129}};
  for_each_case([&](const Scheme& scheme, std::string_view layout, DType dtype) {
    for (const auto& [n, k] : shapes) check(random_weight(scheme, n, k, 0), layout, dtype, k, 0);
  });
}

/// 8 × 1024 has 256 blocks: every E4M4 code stands in one of them.
TEST_F(DequantizeCuda, EqualsTheReferenceForEveryScaleAndFactor) {
  for_each_case([&](const Scheme& scheme, std::string_view layout, DType dtype) {
    for (int exponent : {0, -119, -20, 11, 111}) {
      // f16 scales reach 65504: their tables may not be scaled as far.
      const int factor = scheme.scale == ScaleType::f16 ? std::min(exponent, 111) : exponent;
      check(random_weight(scheme, 8, 1024, factor), layout, dtype, 1024, 0);
    }
  });
}

TEST_F(DequantizeCuda, WritesStridedAndUnalignedRowsAndNothingElse) {
  for_each_case([&](const Scheme& scheme, std::string_view layout, DType dtype) {
    check(random_weight(scheme, 19, 320, 0), layout, dtype, 328, 0);
    check(random_weight(scheme, 19, 320, 0), layout, dtype, 323, 0);
    check(random_weight(scheme, 19, 320, 0), layout, dtype, 320, 1);
    check(random_weight(scheme, 19, 317, 0), layout, dtype, 320, 0);
    check(random_weight(scheme, 19, 317, 0), layout, dtype, 317, 3);
    check(random_weight(scheme, 1, 40, 0), layout, dtype, 41, 8);
  });
}

TEST_F(DequantizeCuda, EqualsTheReferenceForALargeMatrix) {
  check(random_weight({.bits = 3}, 4096, 4096, 0), "canonical", DType::f16, 4096, 0);
  check(random_weight({.bits = 5}, 1000, 4096, 0), "kbit-tile", DType::bf16, 4096, 0);
  check(random_weight({.bits = 3}, 2000, 4128, 0), "kbit-fragment", DType::bf16, 4128, 0);
  check(random_weight({.bits = 5}, 2000, 4096, 0), "kbit-fragment", DType::f16, 4096, 0);
  check(random_weight({.bits = 4}, 600'000, 33, 0), "canonical", DType::f32, 33, 0);  // more rows than a grid is high
}

TEST_F(DequantizeCuda, RefusesWhatItCannotDoBeforeALaunch) {
  const device::Stream stream(test::gpu());
  device::DeviceBuffer memory(test::gpu(), 1 << 16);
  PackedDeviceWeight weight{{.bits = 4}, "canonical", 4, 64, memory.as<uint32_t>(), memory.data(), memory.as<float>()};
  DeviceRows rows{memory.data(), DType::f16, 64};
  const auto refuse = [&](ErrorCode code, std::string_view part, auto&& change) {
    auto bad_weight = weight;
    auto bad_rows = rows;
    change(bad_weight, bad_rows);
    test::expect_error(code, {part}, [&] { dequantize_cuda(bad_weight, bad_rows, stream); });
  };
  refuse(ErrorCode::unsupported, "layout", [](auto& w, auto&) { w.layout = "tiles"; });
  refuse(ErrorCode::unsupported, "I32", [](auto&, auto& r) { r.dtype = DType::i32; });
  refuse(ErrorCode::bad_argument, "stride", [](auto&, auto& r) { r.stride = 63; });
  refuse(ErrorCode::bad_argument, "null", [](auto& w, auto&) { w.codes = nullptr; });
  refuse(ErrorCode::bad_argument, "null", [](auto&, auto& r) { r.data = nullptr; });
  refuse(ErrorCode::bad_argument, "aligned", [](auto&, auto& r) { r.data = static_cast<std::byte*>(r.data) + 1; });
  refuse(ErrorCode::bad_argument, "aligned", [](auto& w, auto&) {
    w.layout = "kbit-fragment";
    w.codes = w.codes + 1;
  });
  refuse(ErrorCode::unsupported, "0 outputs", [](auto& w, auto&) { w.n = 0; });
}

}  // namespace
}  // namespace w4q::kernels
