#include "formats/integer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/float_formats.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

const SchemeRow& integer_row() { return scheme_row(SchemeFamily::integer); }

TEST(Integer, CodesAreNearestWithTiesToEvenAndClamped) {
  EXPECT_EQ(integer_code(0.5f, 1, 8, 4), 8);
  EXPECT_EQ(integer_code(1.5f, 1, 8, 4), 10);
  EXPECT_EQ(integer_code(-2.5f, 1, 8, 4), 6);
  EXPECT_EQ(integer_code(1e30f, 1e-30f, 8, 4), 15);
  EXPECT_EQ(integer_code(-1e30f, 1e-30f, 8, 4), 0);
  EXPECT_EQ(integer_code(3.0f, -1, 8, 4), 5);
  EXPECT_EQ(integer_code(-1.0f, 1, 0, 8), 0);
  EXPECT_EQ(integer_code(254.5f, 1, 0, 8), 254);
  EXPECT_EQ(integer_code(2.0f, 1, 16, 4), 15);  // a zero one above the codes
}

TEST(Integer, RuleOfMinAndMax) {
  const Scheme symmetric = parse_scheme("int4-g128-f32");
  const IntegerScale a = integer_scale(symmetric, -1.5f, 0.5f);
  EXPECT_EQ(a.value, static_cast<float>(1.5 / 7.5));
  EXPECT_EQ(a.zero, 8);
  const Scheme asymmetric = parse_scheme("int4-g128-f32-asym");
  const IntegerScale b = integer_scale(asymmetric, -0.5f, 1.0f);
  EXPECT_EQ(b.value, 0.1f);
  EXPECT_EQ(b.zero, 5);
  // The range holds zero whatever the values are.
  EXPECT_EQ(integer_scale(asymmetric, 0.75f, 1.5f).zero, 0);
  EXPECT_EQ(integer_scale(asymmetric, 0.75f, 1.5f).value, 0.1f);
  EXPECT_EQ(integer_scale(asymmetric, -1.5f, -0.75f).zero, 15);
  const IntegerScale nothing = integer_scale(asymmetric, 0, 0);
  EXPECT_EQ(nothing.value, 1.0f);
  EXPECT_EQ(nothing.zero, 8);
}

TEST(Integer, ScalesAreRoundedToTheirTypeNeverToZeroNorOutOfRange) {
  EXPECT_EQ(integer_scale(parse_scheme("int4-g128-f16"), -1, 1).value, f32_from_f16(f16_from_f32(1 / 7.5f)));
  EXPECT_EQ(integer_scale(parse_scheme("int4-g128-bf16"), -1, 1).value, f32_from_bf16(bf16_from_f32(1 / 7.5f)));
  EXPECT_EQ(integer_scale(parse_scheme("int4-g128-f16"), 0, 1e-30f).value, 0x1p-24f);
  EXPECT_FALSE(integer_scale(parse_scheme("int4-g128-f16"), 0, 1e-30f).saturated);
  const IntegerScale large = integer_scale(parse_scheme("int4-g128-f16"), 0, 1e30f);
  EXPECT_EQ(large.value, 65504.0f);
  EXPECT_TRUE(large.saturated);
  const float top = std::numeric_limits<float>::max();
  for (std::string_view name : {"int8-row-f32", "int8-row-bf16-asym", "int2-row-f32-asym", "int3-row-bf16"}) {
    const Scheme scheme = parse_scheme(name);
    const IntegerScale scale = integer_scale(scheme, -top, top);
    EXPECT_TRUE(scale.saturated) << name;
    const int farthest = scheme.asymmetric ? 1 << scheme.bits : 1 << (scheme.bits - 1);
    EXPECT_TRUE(std::isfinite(scale.value * static_cast<float>(farthest))) << name;
  }
}

TEST(Integer, EncodesAWorkedExample) {
  // Two groups, the second ragged; the first spans −0.5 … 1, so its step is 0.1 and its zero 5.
  const Scheme scheme = parse_scheme("int4-g4-f32-asym");
  const std::vector<float> values{-0.5f, 1.0f, 0.0f, 0.26f, 3.0f, 0.0f};
  const PackedWeight weight = integer_row().encode(scheme, values, 1, 6, {});
  EXPECT_EQ(weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[0], 0x000F85F0u);
  EXPECT_EQ(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[0], 5);
  EXPECT_EQ(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[1], 0);
  EXPECT_EQ(weight.plane(PlaneRole::scales).bytes.as<float>()[1], 0.2f);
  const std::vector<float> decoded = test::decode(weight);
  EXPECT_EQ(decoded, (std::vector<float>{-5 * 0.1f, 10 * 0.1f, 0, 3 * 0.1f, 15 * 0.2f, 0}));
}

TEST(Integer, GroupIndexSaysWhichScale) {
  const Scheme scheme = parse_scheme("int8-g2-f32-actorder");
  PackedWeight weight = allocate_integer(scheme, 1, 4);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(index.begin(), index.end()), (std::vector<int32_t>{0, 0, 1, 1}));
  std::ranges::copy(std::vector<int32_t>{1, 0, 1, 0}, index.begin());
  std::ranges::copy(std::vector<float>{1, 10}, weight.plane(PlaneRole::scales).bytes.as<float>().begin());
  integer_write_codes(weight, 0, std::vector<uint8_t>{129, 130, 131, 132});
  integer_validate(weight, "w");
  EXPECT_EQ(test::decode(weight), (std::vector<float>{10, 2, 30, 4}));
}

TEST(Integer, RowsReadBack) {
  const Scheme scheme = parse_scheme("int3-g32-bf16-asym");
  const PackedWeight weight = integer_row().encode(scheme, test::sample(test::distributions[0], 3, 70), 3, 70, {});
  std::vector<uint8_t> codes(70);
  std::vector<float> scales(3);
  std::vector<uint8_t> zeros(3);
  for (int64_t r = 0; r < 3; ++r) {
    integer_read_codes(weight, r, codes);
    integer_read_scales(weight, r, scales);
    integer_read_zeros(weight, r, zeros);
    std::vector<float> decoded(70);
    integer_row().decode_row(weight, r, decoded);
    for (size_t i = 0; i < 70; ++i) {
      EXPECT_EQ(decoded[i], static_cast<float>(codes[i] - zeros[i / 32]) * scales[i / 32]);
    }
  }
  const PackedWeight symmetric =
      integer_row().encode(parse_scheme("int3-row-f16"), std::vector<float>(9, 1.0f), 3, 3, {});
  zeros.resize(1);
  integer_read_zeros(symmetric, 2, zeros);
  EXPECT_EQ(zeros[0], 4);
}

PackedWeight sound(std::string_view scheme) {
  return integer_row().encode(parse_scheme(scheme), test::sample(test::distributions[0], 3, 70), 3, 70, {});
}

void expect_refused(const PackedWeight& weight, std::initializer_list<std::string_view> parts) {
  test::expect_error(ErrorCode::bad_file, parts, [&] { integer_validate(weight, "layers.0.up"); });
}

TEST(IntegerValidate, RefusesWhatAHostileFileHolds) {
  PackedWeight weight = sound("int3-g32-f16-asym-actorder");
  EXPECT_NO_THROW(integer_validate(weight, "w"));
  weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[2 * 7 + 6] |= 1u << 18;  // 70 codes take 210 = 6 · 32 + 18 bits
  expect_refused(weight, {"layers.0.up", "codes", "padding", "row 2, word 6"});

  weight = sound("int3-g32-f16-asym-actorder");
  weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[4] = 8;
  EXPECT_NO_THROW(integer_validate(weight, "w"));
  weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[4] = 9;
  expect_refused(weight, {"zeros", "row 1, group 1", "0 … 8, got 9"});

  weight = sound("int3-g32-f16-asym-actorder");
  weight.plane(PlaneRole::group_index).bytes.as<int32_t>()[69] = 3;
  expect_refused(weight, {"group_index", "input 69", "0 … 2, got 3"});
  weight.plane(PlaneRole::group_index).bytes.as<int32_t>()[69] = -1;
  expect_refused(weight, {"group_index", "got -1"});

  weight = sound("int3-g32-f16");
  weight.plane(PlaneRole::scales).bytes.as<uint16_t>()[5] = 0x7E00;
  expect_refused(weight, {"scales", "not finite", "row 1, group 2"});
  weight.plane(PlaneRole::scales).bytes.as<uint16_t>()[5] = 0xFBFF;  // −65504
  EXPECT_NO_THROW(integer_validate(weight, "w"));

  weight = sound("int3-g32-f32");
  weight.plane(PlaneRole::scales).bytes.as<float>()[5] = 3e38f;
  expect_refused(weight, {"scales", "too large", "3e+38"});

  weight = sound("int3-g32-f32");
  weight.scheme.bits = 9;
  expect_refused(weight, {"no such scheme", "int9-g32-f32"});
  weight = sound("int3-g32-f32");
  weight.scheme.asymmetric = true;
  expect_refused(weight, {"zeros", "missing"});
  weight = sound("int3-g32-f32");
  weight.n = weight.k = max_dimension;
  test::expect_error(ErrorCode::unsupported, {"2^48"}, [&] { integer_validate(weight, "w"); });
}

/// On N(0,1), 512 columns: each width within 0.1 dB of what was measured when this was written.
TEST(Integer, SignalToNoiseOnNormalWeights) {
  const std::vector<float> values = test::sample(test::distributions[0], 256, 512);
  const auto of = [&](std::string_view name) {
    return test::sqnr(values, test::decode(integer_row().encode(parse_scheme(name), values, 256, 512, {})));
  };
  EXPECT_NEAR(of("int8-g128-f16"), 44.2, 1.0);
  EXPECT_NEAR(of("int4-g128-f16"), 20.0, 1.0);
  EXPECT_NEAR(of("int4-g128-f16-asym"), 20.0, 1.0);
  EXPECT_GT(of("int4-g32-f16"), of("int4-g128-f16"));
  EXPECT_GT(of("int4-g128-f16"), of("int3-g128-f16"));
  EXPECT_GT(of("int3-g128-f16"), of("int2-g128-f16"));
}

}  // namespace
}  // namespace w4q::formats
