// The GPU quantizer gives the bytes and the counts of the CPU quantizer (class E0).
#include "quantize/kbit_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.h"
#include "device/check.h"
#include "device/properties.h"
#include "device/stream.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "gpu.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

constexpr DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr uint8_t poison = 0xA5;

Scheme kbit(int bits, ScaleType scale) { return {formats::SchemeFamily::kbit, bits, 32, scale}; }

/// Values in one of the weight types, `offset` bytes behind an aligned address.
class Matrix {
 public:
  Matrix(std::span<const float> values, DType dtype, int64_t n, int64_t k, size_t offset = 0)
      : dtype_(dtype),
        n_(n),
        k_(k),
        offset_(offset),
        storage_(offset + values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8) {
    narrow(values, dtype, storage_.bytes().subspan(offset));
  }
  TensorView view() const { return {"layers.0.up.weight", dtype_, {n_, k_}, storage_.bytes().subspan(offset_)}; }

 private:
  DType dtype_;
  int64_t n_;
  int64_t k_;
  size_t offset_;
  Buffer storage_;
};

void expect_same(const QuantizeResult& gpu, const QuantizeResult& cpu, const std::string& what) {
  EXPECT_TRUE(bytes_equal(gpu.weight, cpu.weight)) << what;
  for (const auto role : {PlaneRole::codebook, PlaneRole::scales, PlaneRole::codes}) {
    const auto a = gpu.weight.plane(role).bytes.bytes();
    const auto b = cpu.weight.plane(role).bytes.bytes();
    const auto differ = std::ranges::mismatch(a, b);
    EXPECT_TRUE(differ.in1 == a.end()) << what << ": plane " << to_string(role) << " differs at byte "
                                       << differ.in1 - a.begin() << " of " << a.size();
  }
  EXPECT_EQ(gpu.stats.blocks, cpu.stats.blocks) << what;
  EXPECT_EQ(gpu.stats.zero_blocks, cpu.stats.zero_blocks) << what;
  EXPECT_EQ(gpu.stats.saturated_scales, cpu.stats.saturated_scales) << what;
  EXPECT_EQ(gpu.stats.subnormal_scales, cpu.stats.subnormal_scales) << what;
  EXPECT_EQ(gpu.stats.range_exponent, cpu.stats.range_exponent) << what;
}

class KbitCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }

  static void compare(const Matrix& matrix, const Scheme& scheme, const std::string& what,
                      const QuantizeOptions& options = {}) {
    const QuantizeResult cpu = quantizer_row("kbit").run(matrix.view(), scheme, options);
    const QuantizeResult gpu = quantize_kbit_cuda(matrix.view(), scheme, options, test::gpu());
    expect_same(gpu, cpu, concat(what, " ", to_string(scheme)));
  }

  template <class Body>
  static void for_each_scheme(const Body& body) {
    for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
      for (int bits = 2; bits <= 5; ++bits) body(kbit(bits, scale));
    }
  }
};

TEST_F(KbitCuda, EqualsTheCpuForEveryTypeAndShape) {
  constexpr std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {3, 31},     {5, 33},   {64, 95},    {7, 32},
                                                    {31, 64}, {128, 1408}, {1, 8224}, {129, 4096}, {513, 160}};
  for (const auto& [n, k] : shapes) {
    const auto values = test::sample(test::distributions[1], n, k);
    for (DType dtype : dtypes) {
      const Matrix matrix(values, dtype, n, k);
      for_each_scheme([&, n = n, k = k](const Scheme& scheme) {
        compare(matrix, scheme, concat(dtype_name(dtype), " ", n, " × ", k));
      });
    }
  }
}

TEST_F(KbitCuda, EqualsTheCpuForEveryDistribution) {
  for (const test::Distribution& distribution : test::distributions) {
    for (int64_t k : {int64_t{192}, int64_t{200}}) {
      const Matrix matrix(test::sample(distribution, 40, k), DType::f32, 40, k);
      for_each_scheme([&](const Scheme& scheme) { compare(matrix, scheme, concat(distribution.name, " k = ", k)); });
    }
  }
}

/// All finite bit patterns of the 16-bit types, in an order that mixes magnitudes or keeps them together.
TEST_F(KbitCuda, EqualsTheCpuForEveryFiniteValueOfSixteenBits) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (uint32_t factor : {1u, 40503u}) {
      std::vector<uint16_t> raw(65536);
      const uint32_t infinity = dtype == DType::f16 ? 0x7C00 : 0x7F80;
      for (uint32_t i = 0; i < raw.size(); ++i) {
        const auto bits = static_cast<uint16_t>(i * factor);
        raw[i] = (bits & 0x7FFF) < infinity ? bits : 0;
      }
      const TensorView view{"all", dtype, {64, 1024}, bytes_of(raw)};
      for_each_scheme([&](const Scheme& scheme) {
        expect_same(quantize_kbit_cuda(view, scheme, {}, test::gpu()), quantizer_row("kbit").run(view, scheme, {}),
                    concat(dtype_name(dtype), " × ", factor, " ", to_string(scheme)));
      });
    }
  }
}

/// Scales from every E4M4 rounding tie, and weights on every midpoint, next to it, and behind it.
TEST_F(KbitCuda, TiesGoWhereTheCpuPutsThem) {
  for (int bits = 2; bits <= 5; ++bits) {
    const auto table = formats::codebook("nf", bits);
    std::vector<float> midpoints(table.size() - 1);
    formats::kbit_midpoints(table, midpoints);
    std::vector<float> values;
    for (uint16_t code = 0; code < 255; ++code) {
      const float low = formats::decode_scale(code, ScaleType::e4m4);
      const float high = formats::decode_scale(static_cast<uint16_t>(code + 1), ScaleType::e4m4);
      const float tie = (low + high) / 2;
      for (float absmax : {low, tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 99.0f)}) {
        const float scale = formats::store_scale(absmax, ScaleType::e4m4).value;
        values.push_back(absmax);
        for (size_t i = 1; i < 32; ++i) {
          const float on = midpoints[i % midpoints.size()] * scale;
          const float near[] = {on, std::nextafter(on, -99.0f), std::nextafter(on, 99.0f)};
          values.push_back(std::clamp(near[random_bits(code, i) % 3], -absmax, absmax));
        }
      }
    }
    const auto k = static_cast<int64_t>(values.size());
    for (DType dtype : dtypes) {
      const Matrix matrix(values, dtype, 1, k);
      for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) compare(matrix, kbit(bits, scale), "ties");
    }
  }
}

TEST_F(KbitCuda, StreamsManyChunksAndLongRows) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {3, 9'000'003}, {70'000, 33}}) {
    Buffer raw(static_cast<size_t>(n * k * 2));
    const auto values = raw.as<uint16_t>();
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<uint16_t>((random_bits(1, i) & 0x80FF) | 0x3C00);  // ±2^-7 … 2^-5, say
    }
    const TensorView view{"large", DType::bf16, {n, k}, raw.bytes()};
    for (int bits : {3, 5}) {
      const Scheme scheme = kbit(bits, ScaleType::e4m4);
      expect_same(quantize_kbit_cuda(view, scheme, {}, test::gpu()), quantizer_row("kbit").run(view, scheme, {}),
                  concat(n, " × ", k));
    }
  }
}

TEST_F(KbitCuda, TakesBytesAtAnyAddress) {
  const auto values = test::sample(test::distributions[1], 9, 160);
  for (DType dtype : dtypes) {
    for (size_t offset : {1, 2, 5, 8}) {
      compare(Matrix(values, dtype, 9, 160, offset), kbit(3, ScaleType::e4m4), concat("offset ", offset));
    }
  }
}

TEST_F(KbitCuda, TakesTablesOfTheUsersOwn) {
  QuantizeOptions options;
  options.table = formats::parse_codebook("-4 -1 0.5 3", 2, "t");
  for (const auto& distribution : {test::distributions[0], test::distributions[9]}) {
    const Matrix matrix(test::sample(distribution, 6, 100), DType::f32, 6, 100);
    compare(matrix, kbit(2, ScaleType::e4m4), "own table", options);
    options.table = {-1.0f, -0.75f, -0.5f, -0.25f};  // one-sided, not symmetric
    compare(matrix, kbit(2, ScaleType::f16), "one-sided table", options);
  }
  QuantizeOptions quantile;
  quantile.codebook = "nf-quantile";
  compare(Matrix(test::sample(test::distributions[0], 6, 96), DType::bf16, 6, 96), kbit(4, ScaleType::e4m4),
          "nf-quantile", quantile);
}

TEST_F(KbitCuda, BitsandbytesBytesComeFromTheCpu) {
  QuantizeOptions options;
  options.bnb_compatible = true;
  compare(Matrix(test::sample(test::distributions[0], 6, 96), DType::bf16, 6, 96), kbit(4, ScaleType::e4m4), "bnb",
          options);
}

TEST_F(KbitCuda, NamesTheFirstNanAndInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (DType dtype : dtypes) {
    auto values = test::sample(test::distributions[1], 70, 77);
    values[69 * 77 + 5] = nan;
    const Matrix late(values, dtype, 70, 77);
    test::expect_error(ErrorCode::bad_file, {"layers.0.up.weight", "NaN at row 69, column 5"},
                       [&] { quantize_kbit_cuda(late.view(), kbit(4, ScaleType::e4m4), {}, test::gpu()); });
    values[40 * 77 + 76] = -infinity;  // in a ragged tail
    const Matrix early(values, dtype, 70, 77);
    test::expect_error(ErrorCode::bad_file, {"infinity at row 40, column 76"},
                       [&] { quantize_kbit_cuda(early.view(), kbit(3, ScaleType::f16), {}, test::gpu()); });
    auto whole = test::sample(test::distributions[1], 70, 96);
    whole[33 * 96 + 31] = nan;
    whole[33 * 96 + 32] = infinity;
    const Matrix flat(whole, dtype, 70, 96);
    test::expect_error(ErrorCode::bad_file, {"NaN at row 33, column 31"},
                       [&] { quantize_kbit_cuda(flat.view(), kbit(2, ScaleType::e4m4), {}, test::gpu()); });
  }
}

TEST_F(KbitCuda, RefusesWhatTheCpuRefuses) {
  const Matrix matrix(test::sample(test::distributions[0], 4, 100), DType::f32, 4, 100);
  TensorView view = matrix.view();
  view.shape = {400};
  test::expect_error(ErrorCode::unsupported, {"[400]", "matrix"},
                     [&] { quantize_kbit_cuda(view, kbit(4, ScaleType::e4m4), {}, test::gpu()); });
  view = matrix.view();
  view.dtype = DType::i32;
  test::expect_error(ErrorCode::unsupported, {"I32"},
                     [&] { quantize_kbit_cuda(view, kbit(4, ScaleType::e4m4), {}, test::gpu()); });
  test::expect_error(ErrorCode::bad_argument, {"kbit7-b32-e4m4"},
                     [&] { quantize_kbit_cuda(matrix.view(), kbit(7, ScaleType::e4m4), {}, test::gpu()); });
}

/// The entry point for matrices that are in GPU memory already: strides, odd addresses, guards behind the planes.
TEST_F(KbitCuda, DeviceMatricesWithStridesWriteAllPlanesAndNothingElse) {
  const device::Stream stream(test::gpu());
  constexpr size_t guard = 256;
  for (const auto& [n, k, stride, offset] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{37, 96, 96, 0},
                                             {37, 96, 104, 0},
                                             {37, 96, 96, 1},
                                             {37, 75, 81, 3},
                                             {1, 64, 500, 0}}) {
    const auto values = test::sample(test::distributions[1], n, k);
    for (DType dtype : dtypes) {
      const Matrix matrix(values, dtype, n, k);
      const auto element = static_cast<size_t>(dtype_bits(dtype) / 8);
      std::vector<std::byte> strided(static_cast<size_t>(offset + n * stride) * element, std::byte{0xFF});  // NaN
      for (int64_t row = 0; row < n; ++row) {
        std::ranges::copy(
            matrix.view().bytes.subspan(static_cast<size_t>(row * k) * element, static_cast<size_t>(k) * element),
            strided.begin() + static_cast<int64_t>(static_cast<size_t>(offset + row * stride) * element));
      }
      for_each_scheme([&, n = n, k = k, stride = stride, offset = offset](const Scheme& scheme) {
        const QuantizeResult cpu = quantizer_row("kbit").run(matrix.view(), scheme, {});
        const auto expected_codes = cpu.weight.plane(PlaneRole::codes).bytes.bytes();
        const auto expected_scales = cpu.weight.plane(PlaneRole::scales).bytes.bytes();
        const auto input = device::DeviceBuffer::copy_of(strided, stream);
        device::DeviceBuffer codes(test::gpu(), expected_codes.size() + guard);
        device::DeviceBuffer scales(test::gpu(), expected_scales.size() + guard);
        codes.fill(poison, stream);
        scales.fill(poison, stream);
        std::vector<float> codebook;
        quantize_kbit_device({input.data() + offset * static_cast<int64_t>(element), dtype, n, k, stride}, "w", scheme,
                             {}, {codes.as<uint32_t>(), scales.data()}, codebook, stream);
        Buffer got_codes(codes.size());
        Buffer got_scales(scales.size());
        codes.download(got_codes.bytes(), stream);
        scales.download(got_scales.bytes(), stream);
        stream.synchronize();
        const std::string what =
            concat(to_string(scheme), " ", dtype_name(dtype), " k=", k, " stride=", stride, " offset=", offset);
        const auto compare_guarded = [&](std::span<const std::byte> got, std::span<const std::byte> expected) {
          EXPECT_TRUE(std::ranges::equal(got.first(expected.size()), expected)) << what;
          EXPECT_TRUE(std::ranges::all_of(got.subspan(expected.size()),
                                          [](std::byte value) { return value == std::byte{poison}; }))
              << what << ": wrote behind a plane";
        };
        compare_guarded(got_codes.bytes(), expected_codes);
        compare_guarded(got_scales.bytes(), expected_scales);
        EXPECT_TRUE(std::ranges::equal(codebook, cpu.weight.plane(PlaneRole::codebook).bytes.as<float>())) << what;
      });
    }
  }
}

TEST_F(KbitCuda, DeviceMatricesThatCannotBeReadAreRefusedBeforeALaunch) {
  const device::Stream stream(test::gpu());
  device::DeviceBuffer memory(test::gpu(), 4096);
  std::vector<float> codebook;
  const Scheme scheme = kbit(4, ScaleType::e4m4);
  const DevicePlanes planes{memory.as<uint32_t>(), memory.data() + 2048};
  const auto refuse = [&](const DeviceMatrix& matrix, const DevicePlanes& to, std::string_view part) {
    test::expect_error(ErrorCode::bad_argument, {part},
                       [&] { quantize_kbit_device(matrix, "w", scheme, {}, to, codebook, stream); });
  };
  refuse({memory.data(), DType::f32, 2, 32, 31}, planes, "stride");
  refuse({nullptr, DType::f32, 2, 32, 32}, planes, "null");
  refuse({memory.data() + 2, DType::f32, 2, 32, 32}, planes, "aligned");
  refuse({memory.data(), DType::f32, 2, 32, 32}, {nullptr, memory.data()}, "null");
}

}  // namespace
}  // namespace w4q::quantize
