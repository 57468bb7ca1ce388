#include "formats/scheme.h"

#include <gtest/gtest.h>

#include "core/text.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "support.h"

namespace w4q::formats {
namespace {

TEST(Scheme, ShortNamesAreAnsweredWithLongerOnes) {
  const auto refused = [](std::string_view text, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::unsupported, parts, [&] { parse_scheme(text); });
  };
  refused("kbit4", {"hint: for example kbit4-b32-e4m4, kbit4-b32-f16"});
  refused("int4", {"hint: for example int4-g128-f16, int4-g128-f16-asym"});
  refused("int4-g32", {"hint: for example int4-g32-f16"});
  try {
    parse_scheme("nothing");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.hint(), "");
  }
}

TEST(Scheme, PrintsAndParsesEveryScheme) {
  for (const SchemeRow& row : scheme_registry()) {
    for (const Scheme& scheme : row.schemes()) EXPECT_EQ(parse_scheme(to_string(scheme)), scheme);
  }
  EXPECT_EQ(scheme_row(SchemeFamily::kbit).schemes().size(), 8u);
  EXPECT_EQ(to_string(Scheme{SchemeFamily::kbit, 3, 32, ScaleType::e4m4}), "kbit3-b32-e4m4");
  EXPECT_EQ(to_string(Scheme{SchemeFamily::kbit, 4, 32, ScaleType::f16}), "kbit4-b32-f16");
}

TEST(Scheme, NamesOfTheIntegerFamily) {
  using enum ScaleType;
  const auto integer = [](int bits, int block, ScaleType scale, bool asymmetric = false, bool act_order = false) {
    return Scheme{SchemeFamily::integer, bits, block, scale, asymmetric, act_order};
  };
  EXPECT_EQ(parse_scheme("int4-g128-f16"), integer(4, 128, f16));
  EXPECT_EQ(parse_scheme("int4-g128-f16-asym"), integer(4, 128, f16, true));
  EXPECT_EQ(parse_scheme("int3-row-bf16"), integer(3, whole_row, bf16));
  EXPECT_EQ(parse_scheme("int8-g1-f32-asym-actorder"), integer(8, 1, f32, true, true));
  EXPECT_EQ(parse_scheme("int2-g1073741824-f16"), integer(2, 1 << 30, f16));
  for (std::string_view text : {"int",
                                "int4",
                                "int9-g128-f16",
                                "int1-g128-f16",
                                "int4-g0-f16",
                                "int4-g-f16",
                                "int4-g-8-f16",
                                "int4-g0128-f16",
                                "int4-g+8-f16",
                                "int4-g1073741825-f16",
                                "int4-g99999999999-f16",
                                "int04-g128-f16",
                                "int4-b128-f16",
                                "int4-g128-e4m4",
                                "int4-g128",
                                "int4-g128-f16-",
                                "int4-g128-f16-actorder-asym",
                                "int4-g128-f16-asym-asym",
                                "int4-row-f16-actorder",
                                "int4-g128-f16 ",
                                "lut4",
                                "lut4-b48-f32",
                                "lut4-b64-f16",
                                "lut3-b64-f32",
                                "lut4-b8192-f32"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown scheme", "int{2,3,4,5,6,7,8}-{g<inputs>,row}", "lut4-b{32,64"},
                       [&] { parse_scheme(text); });
  }
}

TEST(Scheme, AnythingElseIsRefusedWithTheList) {
  for (std::string_view text : {"", "kbit", "kbit6-b32-e4m4", "kbit3-b64-e4m4", "kbit3-b32-e4m4 ", "KBIT3-b32-e4m4"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown scheme", "kbit5-b32-f16"}, [&] { parse_scheme(text); });
  }
}

TEST(Scheme, BitsPerWeightCountsScalesAndTable) {
  const SchemeRow& row = scheme_row(SchemeFamily::kbit);
  const Scheme scheme{SchemeFamily::kbit, 3, 32, ScaleType::e4m4};
  // 4096 × 4096: 3 bits, 8 bits of scale for 32 weights, and a table of 8 floats.
  EXPECT_DOUBLE_EQ(row.bits_per_weight(scheme, 4096, 4096), 3.25 + 256.0 / (4096.0 * 4096.0));
}

TEST(Packed, DimensionsOutOfRangeAreRefused) {
  const Scheme scheme{SchemeFamily::kbit, 5, 32, ScaleType::f16};
  const int64_t limit = max_dimension;
  for (const auto& [n, k] : {std::pair{int64_t{0}, int64_t{1}}, {1, 0}, {-1, 5}, {limit + 1, 1}, {1, INT64_MAX}}) {
    test::expect_error(ErrorCode::unsupported, {"outputs", "inputs"},
                       [&] { scheme_row(SchemeFamily::kbit).planes(scheme, n, k); });
  }
  for (const PlaneSpec& spec : scheme_row(SchemeFamily::kbit).planes(scheme, limit, limit))
    EXPECT_GT(byte_count(spec.dtype, spec.shape), 0);
}

TEST(Packed, PlanesAreFoundByRoleAndClonedByBytes) {
  const Scheme scheme{SchemeFamily::kbit, 2, 32, ScaleType::e4m4};
  PackedWeight weight = allocate_canonical(scheme, 3, 40);
  EXPECT_EQ(weight.size_bytes(), 3 * 2 * 2 * 4 + 3 * 2 + 4 * 4);
  const PackedWeight copy = weight.clone();
  EXPECT_TRUE(bytes_equal(weight, copy));
  weight.plane(PlaneRole::scales).bytes.as<uint8_t>()[5] = 1;
  EXPECT_FALSE(bytes_equal(weight, copy));
  weight.planes.clear();
  test::expect_error(ErrorCode::internal, {"scales"}, [&] { weight.plane(PlaneRole::scales); });
}

}  // namespace
}  // namespace w4q::formats
