// Integer weights times int8 activations on the GPU: rows against the CPU's, byte for byte, and products against fp64
// ones of the same integers.
#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "integer_weight.h"
#include "kernels/integer/int8_rows_cuda.h"
#include "linear_cuda_check.h"

namespace w4q::kernels {
namespace {

using test::Activations;
using test::IntegerSize;
using test::IntegerWeight;
using test::LinearExtras;

class Int8LinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

std::vector<int32_t> reversed(int64_t k) {
  std::vector<int32_t> order(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(k - 1 - i);
  return order;
}

/// Rows that are hard to round: zeros, the smallest and largest values, infinities and NaN.
Activations hard_rows(int64_t m, int64_t k, int64_t stride, DType dtype) {
  Activations x(m, k, stride, dtype);
  const auto set = [&](int64_t row, int64_t column, uint16_t bits) {
    if (row >= m) return;
    x.bits[static_cast<size_t>(row * stride + column)] = bits;
    x.values[static_cast<size_t>(row * k + column)] = dtype == DType::f16 ? f32_from_f16(bits) : f32_from_bf16(bits);
  };
  for (int64_t c = 0; c < k; ++c) {
    set(1, c, c % 2 == 0 ? 0 : 0x8000);
    set(2, c, static_cast<uint16_t>(c % 3));  // subnormal
    if (c % 2 == 0) set(3, c, dtype == DType::f16 ? 0x7BFF : 0x7F7F);
  }
  set(4, k / 2, dtype == DType::f16 ? 0x7C00 : 0x7F80);
  set(5, k - 1, 0xFFC1);
  return x;
}

TEST_F(Int8LinearCuda, RowsAreTheCpusByteForByte) {
  const device::Stream stream(test::gpu());
  struct Case {
    int64_t m, k, stride;
    bool reorder;
    int sum_inputs;
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const auto& [m, k, stride, reorder, sum_inputs] : {Case{7, 512, 512, false, 128},
                                                            {20, 333, 336, false, 32},
                                                            {130, 64, 65, true, 128},
                                                            {9, 4500, 4504, true, 32}}) {
      const Activations x = hard_rows(m, k, stride, dtype);
      const int8::Int8Order order(m, k);
      const auto x_device = test::on_device(x.bits, stream), inputs = test::on_device(reversed(k), stream);
      auto codes = test::poisoned(static_cast<size_t>(order.bytes()), stream);
      auto scales = test::poisoned(static_cast<size_t>(m) * 4, stream);
      const int64_t sum_count = order.chunks * 128 / sum_inputs * order.padded_rows;
      auto sums = test::poisoned(static_cast<size_t>(sum_count) * 2, stream);
      auto counters = test::poisoned(5 * 4, stream);
      Int8RowsArgs args{m, k, dtype, x_device.data(), stride, reorder ? inputs.as<int32_t>() : nullptr};
      args.codes = codes.as<uint8_t>(), args.scales = scales.as<float>();
      args.sums = sums.as<int16_t>(), args.sum_inputs = sum_inputs;
      args.counters = counters.as<unsigned>(), args.counter_count = 5;
      int8_rows_cuda(args, stream);
      const auto got = test::from_device<int8_t>(codes, static_cast<size_t>(order.bytes()), stream);
      const auto got_scales = test::from_device<uint32_t>(scales, static_cast<size_t>(m), stream);
      const auto got_sums = test::from_device<int16_t>(sums, static_cast<size_t>(sum_count), stream);
      EXPECT_EQ(test::from_device<unsigned>(counters, 5, stream), std::vector<unsigned>(5, 0));
      for (int64_t r = 0; r < m; ++r) {
        std::vector<float> row(x.values.begin() + r * k, x.values.begin() + (r + 1) * k);
        if (reorder) std::ranges::reverse(row);
        std::vector<int8_t> expected(static_cast<size_t>(order.chunks * 128));
        const float scale = quantize_int8(row, std::span(expected).first(row.size()));
        if (std::isnan(scale)) {
          EXPECT_TRUE(std::isnan(std::bit_cast<float>(got_scales[static_cast<size_t>(r)])));
        } else {
          EXPECT_EQ(got_scales[static_cast<size_t>(r)], std::bit_cast<uint32_t>(scale));
        }
        int sum = 0;
        for (int64_t i = 0; i < order.chunks * 128; ++i) {
          const int place = int8::place_of_input(static_cast<int>(i % 128));
          const int64_t at =
              order.group(r, i / 128) + int8::place_of_piece(static_cast<int>(r % 8), place / 16) + place % 16;
          const int8_t code = expected[static_cast<size_t>(i)];
          ASSERT_EQ(got[static_cast<size_t>(at)], code) << "row " << r << ", input " << i;
          sum += code;
          if ((i + 1) % sum_inputs != 0) continue;
          ASSERT_EQ(got_sums[static_cast<size_t>(i / sum_inputs * order.padded_rows + r)], sum);
          sum = 0;
        }
      }
    }
  }
}

void check(std::string_view scheme_name, IntegerSize size, std::span<const int64_t> rows) {
  const device::Stream stream(test::gpu());
  const formats::Scheme scheme = formats::parse_scheme(scheme_name);
  const IntegerWeight weight(scheme, size, "marlin", stream);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int64_t m : rows) {
      const Activations x(m, size.k, size.k, dtype);
      LinearExtras extras;
      extras.int8 = true;
      for (const bool fp32 : {false, true}) {
        extras.fp32 = fp32;
        const auto outcome = test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream);
        const double fp32_bound = test::accepting_kernels(weight.on_device(), m, dtype, true).front()->fp32_error;
        ASSERT_LE(outcome.relative_error, fp32 ? fp32_bound : test::linear_bound(dtype, size.n * size.k))
            << scheme_name << " " << size.n << " × " << size.k << ", " << m << " rows, " << dtype_name(dtype);
      }
    }
  }
}

constexpr IntegerSize ragged[] = {{64, 64}, {1, 1}, {3, 31}, {65, 33}, {128, 1408}, {257, 2097}, {1000, 520}};

TEST_F(Int8LinearCuda, AnySchemeOverRaggedShapes) {
  constexpr int64_t rows[] = {1, 17, 64, 65, 200};
  for (const std::string_view scheme :
       {"int4-g128-f16", "int4-g32-f16", "int4-g64-bf16", "int4-row-f16", "int4-g128-f16-asym", "int4-row-f16-asym",
        "int4-g32-bf16-asym", "int8-g128-f16", "int8-row-bf16", "int8-g64-f16-asym", "int4-g128-f16-actorder",
        "int8-g32-f16-actorder"}) {
    for (const IntegerSize size : ragged) {
      if (scheme.ends_with("actorder") && size.k < 64) continue;
      check(scheme, size, rows);
    }
  }
}

TEST_F(Int8LinearCuda, LargeShapesWithAndWithoutSharedTiles) {
  constexpr int64_t rows[] = {33, 128, 600};
  for (const IntegerSize size : {IntegerSize{4096, 4096}, {512, 14336}}) check("int4-g128-f16", size, rows);
  check("int4-g128-f16-asym", {4096, 2048}, std::span(rows).last(1));
  constexpr int64_t in_two_slices[] = {4100};
  check("int4-g128-f16", {256, 256}, in_two_slices);
}

TEST_F(Int8LinearCuda, BiasStrideResidualTypeAndUnalignedRows) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows[] = {17, 64, 130};
  for (const auto& [scheme, size] : {std::pair{"int4-g64-f16-asym", IntegerSize{300, 200}},
                                     {"int4-g128-f16", IntegerSize{320, 2048}},
                                     {"int8-g128-f16", IntegerSize{299, 200}}}) {
    SCOPED_TRACE(scheme);
    const IntegerWeight weight(formats::parse_scheme(scheme), size, "marlin", stream);
    test::check_every_form(weight.on_device(), weight.decoded(), rows, stream, true);
  }
}

/// The largest sums there are: all inputs at the end of their range, codes as far from the zero point as they get.
TEST_F(Int8LinearCuda, SumsAtTheEndOfTheirRangeAreExact) {
  const device::Stream stream(test::gpu());
  for (const char* scheme : {"int4-row-f16-asym", "int8-row-f16-asym", "int4-row-f16"}) {
    formats::PackedWeight canonical = test::sample_integer(formats::parse_scheme(scheme), 64, 1024, 3);
    const auto codes = canonical.plane(formats::PlaneRole::codes).bytes.bytes();
    std::ranges::fill(codes, std::byte{0xFF});
    if (canonical.scheme.asymmetric) {
      std::ranges::fill(canonical.plane(formats::PlaneRole::zeros).bytes.bytes(), std::byte{0});
    }
    const IntegerWeight weight(canonical, "marlin", stream);
    Activations x(40, 1024, 1024, DType::f16);
    for (size_t i = 0; i < x.bits.size(); ++i) {
      x.values[i] = i / 1024 % 2 == 0 ? 1.0f : -1.0f;
      x.bits[i] = f16_from_f32(x.values[i]);
    }
    LinearExtras extras;
    extras.int8 = extras.fp32 = true;
    EXPECT_LE(test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream).relative_error, 3e-7) << scheme;
  }
}

TEST_F(Int8LinearCuda, RowsThatAreNotFiniteStayThatAndTouchNoOthers) {
  const device::Stream stream(test::gpu());
  const IntegerSize size{256, 512};
  const IntegerWeight weight(formats::parse_scheme("int4-g128-f16"), size, "marlin", stream);
  const Activations x = hard_rows(40, size.k, size.k, DType::f16), plain(40, size.k, size.k, DType::f16);
  LinearExtras extras;
  extras.int8 = true;
  const auto run = [&](const Activations& in) {
    return test::run_linear(weight.on_device(), weight.decoded(), in, extras, stream).y;
  };
  const auto got = run(x), expected = run(plain);
  const size_t row_bytes = got.size() / 40;
  for (size_t r = 0; r < 40; ++r) {
    if (r == 0 || r > 5) {
      EXPECT_TRUE(
          std::equal(got.begin() + r * row_bytes, got.begin() + (r + 1) * row_bytes, expected.begin() + r * row_bytes));
    }
    uint16_t first = 0;
    std::memcpy(&first, got.data() + r * row_bytes, 2);
    EXPECT_EQ(std::isnan(f32_from_f16(first)), r == 4 || r == 5) << r;
  }
}

TEST_F(Int8LinearCuda, TheSameEveryTime) {
  const device::Stream stream(test::gpu());
  const IntegerSize size{1000, 4096};
  const IntegerWeight weight(formats::parse_scheme("int4-g128-f16"), size, "marlin", stream);
  const Activations x(100, size.k, size.k, DType::f16);
  LinearExtras extras;
  extras.int8 = true;
  const auto first = test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream).y;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(test::run_linear(weight.on_device(), weight.decoded(), x, extras, stream).y, first);
  }
}

TEST_F(Int8LinearCuda, OnlyWhereItIsAskedForAndOnlyIntegers) {
  DevicePass pass{.scheme = formats::parse_scheme("int4-g128-f16"), .layout = "marlin", .n = 4096, .k = 4096};
  LinearDesc desc{.gpu = test::gpu().properties(), .passes = {&pass, 1}, .m = 100};
  EXPECT_NE(pick_kernel(desc).name, "marlin-int8");
  desc.int8_activations = true;
  EXPECT_EQ(pick_kernel(desc).name, "marlin-int8");
  for (const auto& [scheme, layout] : {std::pair{"kbit4-b32-e4m4", "kbit-fragment"}, {"int4-g32-f16", "interleaved"}}) {
    pass.scheme = formats::parse_scheme(scheme);
    pass.layout = layout;
    desc.m = 17;
    test::expect_error(ErrorCode::unsupported, {scheme, "of int8", "multiplies 16-bit activations", "marlin-int8"},
                       [&] { pick_kernel(desc); });
  }
}

}  // namespace
}  // namespace w4q::kernels
