// Layouts of integer schemes: what they take, what they refuse and say.
#include <gtest/gtest.h>

#include "formats/integer.h"
#include "kbit_samples.h"
#include "repack/layout_marlin.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::parse_scheme;
using formats::PlaneRole;

PackedWeight sample(std::string_view scheme, int64_t n, int64_t k) {
  return formats::scheme_row(formats::SchemeFamily::integer)
      .encode(parse_scheme(scheme), test::sample(test::distributions[0], n, k), n, k, {});
}

TEST(IntegerLayouts, SayWhyTheyRefuse) {
  const auto reason = [](std::string_view layout, std::string_view scheme) {
    std::string why;
    EXPECT_FALSE(layout_row(layout).accepts(parse_scheme(scheme), 64, 64, &why)) << layout << " " << scheme;
    test::expect_error(ErrorCode::unsupported, {layout, why, scheme},
                       [&] { layout_row(layout).planes(parse_scheme(scheme), 64, 64); });
    return why;
  };
  EXPECT_EQ(reason("awq", "int3-g128-f16"), "its words hold eight 4-bit codes, got 3 bits");
  EXPECT_EQ(reason("awq", "int4-g128-f16-actorder"),
            "it has no group_index: inputs belong to groups by their position");
  EXPECT_EQ(reason("marlin", "int2-g128-f16"), "it has tiles of 4 and 8 bits, got 2");
  EXPECT_EQ(reason("marlin", "int4-g128-f32"), "its scales are f16 or bf16, got f32");
  EXPECT_EQ(reason("interleaved", "int4-g128-bf16"),
            "it holds int4 in groups of 32, 64 or 128 with f16 scales, got int4-g128-bf16");
  for (std::string_view layout : {"awq", "gptq", "marlin", "interleaved"}) {
    EXPECT_EQ(reason(layout, "kbit4-b32-e4m4"), "it holds integer schemes only");
    EXPECT_EQ(reason(layout, "lut4-b64-f32"), "it holds integer schemes only");
  }
  for (std::string_view layout : {"kbit-tile", "kbit-fragment"}) {
    test::expect_error(ErrorCode::unsupported, {"int4-g128-f16"},
                       [&] { layout_row(layout).planes(parse_scheme("int4-g128-f16"), 64, 64); });
    EXPECT_THROW(layout_row(layout).pack(sample("int4-g128-f16", 64, 64)), Error);
  }
}

TEST(IntegerLayouts, PadToWholeTiles) {
  const auto shape = [](std::string_view layout, std::string_view scheme, PlaneRole role) {
    for (const auto& spec : layout_row(layout).planes(parse_scheme(scheme), 130, 200)) {
      if (spec.role == role) return spec.shape;
    }
    return Shape{};
  };
  EXPECT_EQ(shape("marlin", "int4-g128-f16-asym", PlaneRole::codes), (Shape{13, 384}));  // 208 × 192
  EXPECT_EQ(shape("marlin", "int8-g128-f16-asym", PlaneRole::codes), (Shape{13, 768}));
  EXPECT_EQ(shape("marlin", "int4-g128-f16-asym", PlaneRole::scales), (Shape{2, 192}));
  EXPECT_EQ(shape("marlin", "int4-g128-f16-asym", PlaneRole::zeros), (Shape{2, 24}));
  EXPECT_EQ(shape("awq", "int4-g128-f16-asym", PlaneRole::codes), (Shape{200, 17}));
  EXPECT_EQ(shape("awq", "int4-g128-f16-asym", PlaneRole::zeros), (Shape{2, 17}));
  EXPECT_EQ(shape("gptq", "int3-g128-f16-asym", PlaneRole::codes), (Shape{21, 160}));  // 224 inputs, 160 outputs
  EXPECT_EQ(shape("gptq", "int3-g128-f16-asym", PlaneRole::zeros), (Shape{2, 15}));
  EXPECT_EQ(shape("gptq", "int3-g128-f16-asym-actorder", PlaneRole::group_index), (Shape{200}));
  EXPECT_EQ(shape("interleaved", "int4-g32-f16", PlaneRole::codes), (Shape{7, 130, 4}));
  EXPECT_EQ(shape("interleaved", "int4-g64-f16-asym", PlaneRole::scales), (Shape{4, 130}));
  EXPECT_EQ(shape("interleaved", "int4-g64-f16-asym", PlaneRole::zeros), (Shape{4, 17}));
}

TEST(IntegerLayouts, RefusePaddingThatIsNotZero) {
  const auto refused = [](PackedWeight packed, PlaneRole role, int64_t word, int bit,
                          std::initializer_list<std::string_view> parts) {
    packed.plane(role).bytes.as<uint32_t>()[static_cast<size_t>(word)] |= 1u << bit;
    test::expect_error(ErrorCode::bad_file, parts, [&] { layout_row(packed.layout).unpack(packed, "layers.0.up"); });
  };
  const auto marlin = [] { return layout_row("marlin").pack(sample("int4-g128-f16-asym", 60, 70)); };
  const MarlinMap map(4, 60, 70, 1);
  const BitAt beyond_row = map.code_bit(61, 3, 2);
  refused(marlin(), PlaneRole::codes, beyond_row.word, beyond_row.bit,
          {"layers.0.up", "codes", "marlin", "row 61, column 3", "60 rows of 70 columns"});
  const BitAt beyond_col = map.code_bit(59, 79, 0);
  refused(marlin(), PlaneRole::codes, beyond_col.word, beyond_col.bit, {"row 59, column 79"});
  const BitAt zero = map.zero_bit(63, 0, 3);
  refused(marlin(), PlaneRole::zeros, zero.word, zero.bit, {"zeros", "row 63, group 0"});
  refused(marlin(), PlaneRole::scales, map.scale(62, 0) / 2, map.scale(62, 0) % 2 * 16, {"scales", "row 62, group 0"});
}

TEST(IntegerLayouts, AZeroPointOneAboveTheCodesIsRefused) {
  PackedWeight weight = sample("int4-g32-f16-asym", 16, 64);
  weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[2 * 5 + 1] = 16;
  for (std::string_view layout : {"awq", "gptq", "marlin"}) {
    test::expect_error(ErrorCode::unsupported, {layout, "zero point 16", "row 5, group 1"},
                       [&] { layout_row(layout).pack(weight); });
  }
  EXPECT_TRUE(bytes_equal(layout_row("canonical").pack(weight), weight));
}

/// Rows and columns beyond one task's strip and chunk.
TEST(IntegerLayouts, LargeWeightsComeBack) {
  for (std::string_view scheme : {"int4-g128-f16-asym", "int8-g64-f16", "int4-g128-f16-asym-actorder", "int3-row-bf16",
                                  "int4-g32-f16", "int4-g32-f16-asym", "int4-g64-f16", "int2-g64-f32-asym"}) {
    const PackedWeight weight = sample(scheme, 300, 1100);
    for (std::string_view layout : {"awq", "gptq", "marlin", "interleaved"}) {
      if (!layout_row(layout).accepts(weight.scheme, 300, 1100, nullptr)) continue;
      const PackedWeight packed = layout_row(layout).pack(weight);
      EXPECT_TRUE(bytes_equal(layout_row(layout).unpack(packed, "w"), weight)) << layout << " " << scheme;
      EXPECT_TRUE(bytes_equal(pack_by_place(layout_row(layout), weight), packed)) << layout << " " << scheme;
    }
  }
}

TEST(IntegerLayouts, MarlinServesTargets) {
  EXPECT_EQ(layout_for_target("sm90", parse_scheme("int4-g128-f16"), 64, 64).name, "marlin");
  test::expect_error(ErrorCode::unsupported, {"marlin: it has tiles of 4 and 8 bits, got 3"},
                     [] { layout_for_target("sm90", parse_scheme("int3-g128-f16"), 64, 64); });
}

}  // namespace
}  // namespace w4q::repack
