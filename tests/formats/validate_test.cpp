#include <gtest/gtest.h>

#include <limits>

#include "formats/codebook.h"
#include "formats/kbit.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

constexpr int64_t n = 3;
constexpr int64_t k = 70;  // three blocks, the last with 6 of 32 lanes

PackedWeight sound(ScaleType scale = ScaleType::e4m4, int bits = 3) {
  const Scheme scheme{SchemeFamily::kbit, bits, 32, scale};
  return scheme_row(SchemeFamily::kbit)
      .encode(scheme, test::sample(test::distributions[0], n, k), n, k, codebook("nf", bits));
}

void validate(const PackedWeight& weight, std::string_view name) {
  scheme_row(SchemeFamily::kbit).validate(weight, name);
}

void expect_damage(const PackedWeight& weight, std::initializer_list<std::string_view> parts) {
  test::expect_error(ErrorCode::bad_file, parts, [&] { validate(weight, "layers.0.up"); });
}

TEST(Validate, AcceptsWhatTheEncoderMakes) {
  for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
    for (int bits = 2; bits <= 5; ++bits) EXPECT_NO_THROW(validate(sound(scale, bits), "w"));
  }
}

TEST(Validate, RefusesAMissingExtraOrDoublePlane) {
  PackedWeight weight = sound();
  weight.planes.erase(weight.planes.begin());
  expect_damage(weight, {"layers.0.up", "codes", "missing", "I32 [3, 3, 3]", "kbit3-b32-e4m4"});
  weight = sound();
  weight.planes.push_back({weight.planes[1].spec, weight.planes[1].bytes.clone()});
  expect_damage(weight, {"expected 3 planes, got 4"});
}

TEST(Validate, RefusesOtherTypesShapesAndSizes) {
  PackedWeight weight = sound();
  weight.plane(PlaneRole::codes).spec.dtype = DType::u32;
  expect_damage(weight, {"codes", "expected I32 [3, 3, 3], got U32 [3, 3, 3]"});
  weight = sound();
  weight.plane(PlaneRole::scales).spec.shape = {9};
  expect_damage(weight, {"scales", "[3, 3]", "[9]"});
  weight = sound();
  weight.plane(PlaneRole::scales).bytes = Buffer(8);
  expect_damage(weight, {"scales", "expected 9", "got 8"});
  weight = sound();
  weight.plane(PlaneRole::codebook).spec.shape = {16};
  expect_damage(weight, {"codebook", "[8]", "[16]"});
  weight = sound();
  weight.k = 100;  // other than the planes: one more block
  expect_damage(weight, {"[3, 4, 3]"});
}

TEST(Validate, RefusesSchemesAndLayoutsThatDoNotExist) {
  PackedWeight weight = sound();
  weight.scheme.bits = 9;
  expect_damage(weight, {"no such scheme"});
  weight = sound();
  weight.layout = "kbit-tile";
  expect_damage(weight, {"canonical", "kbit-tile"});
}

TEST(Validate, RefusesHugeSizesWithoutOverflow) {
  PackedWeight weight = sound();
  for (int64_t size : {int64_t{0}, int64_t{-5}, max_dimension + 1, std::numeric_limits<int64_t>::max()}) {
    weight.n = size;
    test::expect_error(ErrorCode::unsupported, {"layers.0.up"}, [&] { validate(weight, "layers.0.up"); });
  }
  weight.n = max_dimension;
  weight.k = max_dimension;
  expect_damage(weight, {"codes", "1073741824"});
}

TEST(Validate, RefusesPaddingBitsByPlace) {
  PackedWeight weight = sound();
  weight.plane(PlaneRole::codes).bytes.as<uint32_t>()[(1 * 3 + 2) * 3 + 1] |= 1u << 6;
  expect_damage(weight, {"codes", "padding", "row 1, block 2, bit plane 1"});
}

TEST(Validate, RefusesTablesThatAreNotTables) {
  PackedWeight weight = sound();
  weight.plane(PlaneRole::codebook).bytes.as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  expect_damage(weight, {"codebook", "entry 3"});
  weight = sound();
  weight.plane(PlaneRole::codebook).bytes.as<float>()[3] = 0.9f;
  expect_damage(weight, {"codebook", "3 and 4", "do not ascend"});
  weight = sound();
  weight.plane(PlaneRole::codebook).bytes.as<float>()[7] = 3e38f;
  // 3e38 leaves gaps below 2^-20 of the largest, and its product with a scale of 31 is infinite.
  expect_damage(weight, {"codebook"});
}

TEST(Validate, RefusesScalesThatAreNotScales) {
  const auto with_scale = [](uint16_t bits) {
    PackedWeight weight = sound(ScaleType::f16);
    weight.plane(PlaneRole::scales).bytes.as<uint16_t>()[5] = bits;
    return weight;
  };
  expect_damage(with_scale(0x7C00), {"scales", "non-finite", "row 1, block 2"});
  expect_damage(with_scale(0x7E00), {"non-finite"});
  expect_damage(with_scale(0xBC00), {"negative", "-1"});
  EXPECT_NO_THROW(validate(with_scale(0x0001), "w"));
}

TEST(Validate, NamesFromFilesArePrintedSafely) {
  PackedWeight weight = sound();
  weight.planes.clear();
  test::expect_error(ErrorCode::bad_file, {"a\\x1B[31m"}, [&] { validate(weight, "a\x1b[31m"); });
}

}  // namespace
}  // namespace w4q::formats
