// The fast array conversions equal the scalar definition bit for bit on every instruction set of this machine.
#include "core/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/float_formats.h"
#include "core/text.h"
#include "core/views.h"
#include "each_target.h"
#include "support.h"

namespace w4q {
using test::expect_error;
using test::for_each_target;
namespace {

std::vector<uint16_t> all_patterns() {
  std::vector<uint16_t> patterns(65536);
  std::iota(patterns.begin(), patterns.end(), uint16_t{0});
  return patterns;
}

void check_widen(DType dtype, float (*scalar)(uint16_t)) {
  const auto patterns = all_patterns();
  for_each_target([&] {
    std::vector<float> wide(patterns.size());
    widen(bytes_of(patterns), dtype, wide);
    for (size_t i = 0; i < patterns.size(); ++i) {
      const float expected = scalar(patterns[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << std::hex << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected)) << std::hex << i;
      }
    }
  });
}

TEST(Widen, F16EqualsTheScalarDefinitionOverAllPatterns) { check_widen(DType::f16, f32_from_f16); }

TEST(Widen, Bf16EqualsTheScalarDefinitionOverAllPatterns) { check_widen(DType::bf16, f32_from_bf16); }

TEST(Widen, AnyLengthAndAlignment) {
  const auto patterns = all_patterns();
  for_each_target([&] {
    for (size_t length = 0; length < 70; ++length) {
      for (const size_t misalignment : {0, 1, 3}) {
        std::vector<std::byte> bytes(2 * length + misalignment);
        if (length > 0) std::memcpy(bytes.data() + misalignment, patterns.data() + 0x3000, 2 * length);
        std::vector<float> wide(length + 1, -7.0f);
        widen(std::span(bytes).subspan(misalignment), DType::f16, std::span(wide).first(length));
        for (size_t i = 0; i < length; ++i) ASSERT_EQ(wide[i], f32_from_f16(static_cast<uint16_t>(0x3000 + i)));
        ASSERT_EQ(wide[length], -7.0f) << "wrote past the end";
      }
    }
  });
}

TEST(Narrow, RoundsLikeTheScalarDefinition) {
  const std::vector<float> values{0.0f, -0.0f, 1.0f, 1.00048828125f, 65520.0f, 1e-8f, -3.14159f};
  std::vector<std::byte> bytes(2 * values.size());
  narrow(values, DType::f16, bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    EXPECT_EQ(bits, f16_from_f32(values[i]));
  }
  narrow(values, DType::bf16, bytes);
  uint16_t bits = 0;
  std::memcpy(&bits, bytes.data() + 12, 2);
  EXPECT_EQ(bits, bf16_from_f32(-3.14159f));
}

/// Bits around everything that rounding decides: all exponents, with mantissas next to halves and to their ends.
std::vector<float> edges() {
  std::vector<float> values;
  for (uint32_t top = 0; top < 512; ++top) {
    for (uint32_t kept = 0; kept < 8; ++kept) {
      for (const uint32_t rest : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x1FFFu, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
        const uint32_t mantissa = kept << 20 | (kept % 2) << 16 | (kept / 2 % 2) << 13;
        values.push_back(std::bit_cast<float>(top << 23 | (mantissa ^ rest)));
      }
    }
  }
  return values;
}

TEST(Narrow, EqualsTheScalarDefinitionOfEveryInstructionSet) {
  const auto values = edges();
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for_each_target([&] {
      std::vector<std::byte> bytes(2 * values.size());
      narrow(values, dtype, bytes);
      for (size_t i = 0; i < values.size(); ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, bytes.data() + 2 * i, 2);
        ASSERT_EQ(bits, dtype == DType::f16 ? f16_from_f32(values[i]) : bf16_from_f32(values[i])) << values[i];
      }
    });
  }
}

TEST(Narrow, AnyLengthAndAlignment) {
  const std::vector<float> values(40, 1.5f);
  for_each_target([&] {
    for (size_t length = 0; length < values.size(); ++length) {
      std::vector<std::byte> bytes(2 * length + 2, std::byte{7});
      narrow(std::span(values).first(length), DType::bf16, std::span(bytes).subspan(1, 2 * length));
      for (size_t i = 0; i < 2 * length; ++i) ASSERT_EQ(bytes[1 + i], i % 2 == 0 ? std::byte{0xC0} : std::byte{0x3F});
      ASSERT_EQ(bytes.front(), std::byte{7});
      ASSERT_EQ(bytes.back(), std::byte{7}) << "wrote past the end";
    }
  });
}

/// Scales whose products round, overflow, vanish and are nothing.
const std::vector<float> odd_scales{1.0f, 0.0123f,  -3.3f, 0x1.fffffep127f, 0x1p-149f, 0x1.234p-130f,
                                    0.0f, INFINITY, NAN};

void expect_same(float found, float expected, const std::string& where) {
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(found)) << where;
  } else {
    ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(expected)) << where;
  }
}

/// All codes, in rows of every length to 300, in blocks of this many, under all of the scales.
template <class Widen, class ValueOf>
void check_small_floats(size_t block, size_t step, Widen widen_row, ValueOf value_of) {
  for_each_target([&] {
    for (size_t length = step; length <= 300; length += step) {
      std::vector<std::byte> codes(length);
      for (size_t i = 0; i < length; ++i) codes[i] = static_cast<std::byte>(i * 7 + length);
      std::vector<float> scales((length + block - 1) / block), out(length + 1, -7.0f);
      for (size_t b = 0; b < scales.size(); ++b) scales[b] = odd_scales[(b + length) % odd_scales.size()];
      widen_row(codes, scales, block, std::span(out).first(length));
      for (size_t i = 0; i < length; ++i) {
        const float scale = scales[i / block];
        expect_same(out[i], value_of(codes, i) * scale, concat(length, " values, the one at ", i));
      }
      ASSERT_EQ(out[length], -7.0f) << "wrote past the end";
    }
  });
}

TEST(SmallFloats, E4m3EqualsTheScalarDefinitionInRaggedBlocks) {
  for (const size_t block : {1, 3, 16, 31, 128, 1000}) {
    check_small_floats(block, 1, widen_e4m3,
                       [](const auto& codes, size_t i) { return f32_from_e4m3(static_cast<uint8_t>(codes[i])); });
  }
}

TEST(SmallFloats, E2m1EqualsTheScalarDefinitionInRaggedBlocks) {
  for (const size_t block : {2, 16, 32, 34, 1000}) {
    check_small_floats(block, 2, widen_e2m1, [](const auto& codes, size_t i) {
      return f32_from_e2m1(static_cast<uint32_t>(codes[i / 2]) >> i % 2 * 4 & 15);
    });
  }
}

TEST(SmallFloats, RefusesTooFewCodesAndScales) {
  std::vector<float> out(32);
  const std::vector<float> scales(2, 1.0f);
  const std::vector<std::byte> codes(32);
  expect_error(ErrorCode::internal, {"short"}, [&] { widen_e4m3(std::span(codes).first(31), scales, 16, out); });
  expect_error(ErrorCode::internal, {"scales"}, [&] { widen_e4m3(codes, scales, 15, out); });
  expect_error(ErrorCode::internal, {"short"}, [&] { widen_e2m1(std::span(codes).first(15), scales, 16, out); });
  expect_error(ErrorCode::internal, {"half"}, [&] { widen_e2m1(codes, scales, 17, out); });
}

TEST(Widen, RefusesOtherTypesAndShortSources) {
  std::vector<float> out(4);
  const std::vector<std::byte> bytes(7);
  expect_error(ErrorCode::internal, {"weight type"}, [&] { widen(bytes, DType::i32, out); });
  expect_error(ErrorCode::internal, {"short"}, [&] { widen(bytes, DType::f16, out); });
}

}  // namespace
}  // namespace w4q
