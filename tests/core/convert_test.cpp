// The fast array conversions equal the scalar definition bit for bit on every instruction set of this machine.
#include "core/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include <hwy/targets.h>

#include "core/float_formats.h"
#include "core/views.h"
#include "support.h"

namespace w4q {
using test::expect_error;
namespace {

/// Runs `body` once per instruction set that this machine supports.
template <class Body>
void for_each_target(Body body) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

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

TEST(Widen, RefusesOtherTypesAndShortSources) {
  std::vector<float> out(4);
  const std::vector<std::byte> bytes(7);
  expect_error(ErrorCode::internal, {"weight type"}, [&] { widen(bytes, DType::i32, out); });
  expect_error(ErrorCode::internal, {"short"}, [&] { widen(bytes, DType::f16, out); });
}

}  // namespace
}  // namespace w4q
