#include "formats/lut.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "formats/table/nested_scales.h"
#include "formats/table/table_format.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

const SchemeRow& lut_row() { return scheme_row(SchemeFamily::lut); }

std::vector<float> floats(const io::Checkpoint& file, std::string_view name) {
  const auto loaded = file.load(name);
  std::vector<float> values(loaded->bytes.size() / 4);
  std::memcpy(values.data(), loaded->bytes.data(), loaded->bytes.size());
  return values;
}

/// bitsandbytes' bytes have the even code in the high nibble.
std::vector<std::byte> swap_nibbles(std::span<const std::byte> bytes) {
  std::vector<std::byte> result(bytes.begin(), bytes.end());
  for (std::byte& byte : result) byte = (byte << 4) | (byte >> 4);
  return result;
}

TEST(Lut, GoldenWeightsEncodeToTheirBytes) {
  for (const bool is_nf4 : {true, false}) {
    const auto file =
        io::Checkpoint::open(test::testdata() / "golden" / (is_nf4 ? "bnb_nf4.safetensors" : "bnb_fp4.safetensors"));
    const auto& table = is_nf4 ? nf4_table() : fp4_table();
    EXPECT_EQ(floats(file, "weight.quant_map"), std::vector<float>(table.begin(), table.end()));
    const auto values = floats(file, "in.weight");
    const PackedWeight weight = lut_row().encode(parse_scheme("lut4-b64-f32"), values, 24, 128, table);
    const auto scales = weight.plane(PlaneRole::scales).bytes.as<float>();
    EXPECT_EQ(std::vector<float>(scales.begin(), scales.end()), floats(file, "weight.absmax"));
    EXPECT_TRUE(
        std::ranges::equal(swap_nibbles(weight.plane(PlaneRole::codes).bytes.bytes()), file.load("weight")->bytes));
    EXPECT_NO_THROW(lut_row().validate(weight, "w"));
  }
}

/// The stored table and factors are used as they are; the codes follow from the decoded scales.
TEST(Lut, GoldenNestedScalesDecode) {
  for (std::string_view name : {"bnb_nf4_nested.safetensors", "bnb_fp4_nested.safetensors"}) {
    const auto file = io::Checkpoint::open(test::testdata() / "golden" / name);
    const Scheme scheme = parse_scheme("lut4-b64-nested");
    const auto values = floats(file, "in.weight");
    const auto table = floats(file, "weight.quant_map");
    const auto nested = floats(file, "weight.nested_quant_map");
    PackedWeight weight = lut_row().encode(scheme, values, 24, 128, table);
    // Other programs' last places differ (docs/int.md): 2 ulp at most.
    const std::vector<float> ours = nested_table();
    ASSERT_EQ(ours.size(), nested.size());
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_NEAR(ours[i], nested[i], 3e-7f * std::abs(ours[i])) << i;
    const auto stored = file.load("weight.absmax");
    EXPECT_TRUE(std::ranges::equal(weight.plane(PlaneRole::scales).bytes.bytes(), stored->bytes));
    EXPECT_NO_THROW(lut_row().validate(weight, "w"));
  }
}

TEST(Lut, BlocksRunAcrossRowEnds) {
  const Scheme scheme = parse_scheme("lut4-b32-f32");
  std::vector<float> values(3 * 21, 0.5f);
  values[31] = 4.0f;   // row 1, column 10: the last of block 0
  values[32] = -2.0f;  // the first of block 1
  PackedWeight weight = lut_row().encode(scheme, values, 3, 21, nf4_table());
  EXPECT_EQ(scale_at(weight, 0), 4.0f);
  EXPECT_EQ(scale_at(weight, 1), 2.0f);
  const std::vector<float> decoded = test::decode(weight);
  EXPECT_EQ(decoded[31], 4.0f);
  EXPECT_EQ(decoded[32], -2.0f);
  EXPECT_EQ(decoded[30], 4.0f * 0.16093020141124725f);
  EXPECT_EQ(decoded[33], 2.0f * 0.24611230194568634f);
  // 63 codes: the last nibble is padding.
  weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[7] |= 1u << 28;
  test::expect_error(ErrorCode::bad_file, {"padding", "word 7", "7 of its 8"},
                     [&] { lut_row().validate(weight, "w"); });
}

TEST(Lut, RefusesWhatAHostileFileHolds) {
  const std::vector<float> values = test::sample(test::distributions[0], 3, 70);
  const auto refused = [](const PackedWeight& weight, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::bad_file, parts, [&] { lut_row().validate(weight, "layers.0.up"); });
  };
  for (const PlaneRole role :
       {PlaneRole::codebook, PlaneRole::nested_scales, PlaneRole::nested_codebook, PlaneRole::nested_offset}) {
    PackedWeight weight = lut_row().encode(parse_scheme("lut4-b64-nested"), values, 3, 70, fp4_table());
    weight.plane(role).bytes.as<float>().back() = std::numeric_limits<float>::quiet_NaN();
    refused(weight, {"layers.0.up", to_string(role), "not finite"});
  }
  PackedWeight weight = lut_row().encode(parse_scheme("lut4-b64-f32"), values, 3, 70, fp4_table());
  weight.plane(PlaneRole::scales).bytes.as<float>()[1] = 3e38f;
  EXPECT_NO_THROW(lut_row().validate(weight, "w"));
  weight.plane(PlaneRole::codebook).bytes.as<float>()[1] = 2;
  refused(weight, {"scales", "too large"});
  weight.scheme.bits = 3;
  refused(weight, {"no such scheme", "lut3-b64-f32"});
}

TEST(Lut, EncodeWantsATableOfSixteen) {
  test::expect_error(ErrorCode::bad_argument, {"16 finite"}, [] {
    lut_row().encode(parse_scheme("lut4-b64-f32"), std::vector<float>(64), 1, 64, std::vector<float>(8));
  });
}

}  // namespace
}  // namespace w4q::formats
