// NVFP4, MXFP4, MXFP8 and FP8: scales that are never zero, factors that are powers of two, blocks that span rows.
#include "formats/small_float.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "formats/dialect/small_float.h"
#include "formats/table/table_format.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

const SchemeRow& float_row() { return scheme_row(SchemeFamily::small_float); }

PackedWeight encode_floats(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k) {
  return float_row().encode(scheme, values, n, k, small_float_table(scheme.bits));
}

std::vector<float> decode(const PackedWeight& weight) {
  std::vector<float> values(static_cast<size_t>(weight.n * weight.k));
  const auto k = static_cast<size_t>(weight.k);
  for (int64_t r = 0; r < weight.n; ++r) {
    float_row().decode_row(weight, r, std::span(values).subspan(static_cast<size_t>(r) * k, k));
  }
  return values;
}

TEST(SmallFloat, NamesOfTheField) {
  for (const char* name : {"nvfp4", "nvfp4-div", "mxfp4", "mxfp8", "fp8-tensor", "fp8-channel", "fp8-block128",
                           "fp8-channel-bf16", "fp8-block128-e8m0", "fp8-tensor-f16"}) {
    EXPECT_EQ(to_string(parse_scheme(name)), name);
  }
  for (const char* name : {"fp8", "fp8-channel-e8m0", "nvfp4-f32", "mxfp4-div"}) {
    EXPECT_FALSE(float_row().parse(name).has_value()) << name;
  }
}

/// 4 bits and a byte for 16; with a byte for 32; the table and the factor beside them.
TEST(SmallFloat, BitsPerWeight) {
  const auto bits = [](const char* name) { return float_row().bits_per_weight(parse_scheme(name), 4096, 4096); };
  EXPECT_NEAR(bits("nvfp4"), 4.5, 1e-4);
  EXPECT_NEAR(bits("mxfp4"), 4.25, 1e-4);
  EXPECT_NEAR(bits("mxfp8"), 8.25, 1e-3);
  EXPECT_NEAR(bits("fp8-tensor"), 8.0, 1e-3);
  EXPECT_NEAR(bits("fp8-channel"), 8.0078, 1e-3);
  EXPECT_NEAR(bits("fp8-block128"), 8.002, 1e-3);
}

/// What rounding makes of a scale never is zero: a block of small weights keeps its sign and size, one of zeros has 1.
TEST(SmallFloat, NoScaleIsZero) {
  constexpr int64_t n = 256, k = 256;
  for (const Scheme& scheme : float_row().schemes()) {
    for (const float small : {0.0f, 1e-38f, 1e-12f, 1e-7f, 1e-4f}) {
      std::vector<float> values(n * k, small);
      values[0] = 1.0f;
      const PackedWeight weight = encode_floats(scheme, values, n, k);
      const Plane& scales = weight.plane(PlaneRole::scales);
      for (int64_t i = 0; i < element_count(scales.spec.shape); ++i) {
        ASSERT_GT(load_scale(scales, static_cast<size_t>(i)), 0) << to_string(scheme) << " " << small << " at " << i;
      }
      EXPECT_NO_THROW(float_row().validate(weight, "w"));
    }
  }
}

/// The factor is a power of two that leaves room for a scale of twice the largest; its reciprocal says the same.
TEST(SmallFloat, FactorsArePowersOfTwo) {
  for (float absmax = 1e-30f; absmax < 1e30f; absmax *= 1.37f) {
    const float factor = small_float_factor(absmax);
    EXPECT_TRUE(has_exact_reciprocal(factor)) << absmax;
    const double scale = double{absmax} / 6 / double{factor};
    EXPECT_GE(scale, 108 * (1 - 1e-6)) << absmax;
    EXPECT_LT(scale, 216 * (1 + 1e-6)) << absmax;
  }
  EXPECT_EQ(small_float_factor(0), 1.0f);
  const auto values = test::sample(test::distributions[0], 8, 64);
  EXPECT_EQ(decode(encode_floats(parse_scheme("nvfp4"), values, 8, 64)),
            decode(encode_floats(parse_scheme("nvfp4-div"), values, 8, 64)));
}

/// Encoding what was decoded gives the same bytes: maxima keep their scales, and tensors their factor.
TEST(SmallFloat, EncodingWhatWasDecodedChangesNothing) {
  for (const Scheme& scheme : float_row().schemes()) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{130, 200}, {5, 33}, {256, 256}}) {
      const PackedWeight once = encode_floats(scheme, test::sample(test::distributions[0], n, k), n, k);
      EXPECT_TRUE(bytes_equal(encode_floats(scheme, decode(once), n, k), once))
          << to_string(scheme) << " " << n << " × " << k;
    }
  }
}

/// compressed-tensors' rule: a maximum from 3.5 up to 7 in units of the scale, which E2M1 rounds to 4 or 6.
TEST(SmallFloat, PowersOfTwoByTheirRule) {
  const Scheme mxfp4 = parse_scheme("mxfp4"), mxfp8 = parse_scheme("mxfp8");
  const auto scale = [](const Scheme& scheme, float absmax) { return small_float_scale(scheme, absmax, 1).value; };
  EXPECT_EQ(scale(mxfp4, 3.4999998f), 0.5f);
  EXPECT_EQ(scale(mxfp4, 3.5f), 1.0f);
  EXPECT_EQ(scale(mxfp4, 6.9999995f), 1.0f);
  EXPECT_EQ(scale(mxfp4, 7.0f), 2.0f);
  EXPECT_EQ(scale(mxfp8, 464.0f), 1.0f);
  EXPECT_EQ(scale(mxfp8, 464.00003f), 2.0f);
}

TEST(SmallFloat, BlocksOfManyRowsShareAScale) {
  const Scheme blocks = parse_scheme("fp8-block128"), tensor = parse_scheme("fp8-tensor");
  EXPECT_EQ(float_row().planes(blocks, 130, 200)[1].shape, (Shape{2, 2}));
  EXPECT_EQ(float_row().planes(tensor, 130, 200)[1].shape, (Shape{1, 1}));
  EXPECT_EQ(float_row().place(blocks, 130, 200, 127, 199, 0).scale, 1);
  EXPECT_EQ(float_row().place(blocks, 130, 200, 128, 0, 0).scale, 2);
  std::vector<float> values(130 * 200, 1.0f);
  values[129 * 200 + 5] = 448;  // the last block of rows
  const auto weight = encode_floats(blocks, values, 130, 200);
  EXPECT_EQ(weight.plane(PlaneRole::scales).bytes.as<float>()[2], 1.0f);
  EXPECT_LT(weight.plane(PlaneRole::scales).bytes.as<float>()[0], 1.0f);
}

TEST(SmallFloat, ValidateRefusesNanAndOtherTables) {
  const auto refused = [](const char* scheme, std::string_view part, auto&& damage) {
    PackedWeight weight = encode_floats(parse_scheme(scheme), test::sample(test::distributions[0], 4, 96), 4, 96);
    damage(weight);
    test::expect_error(ErrorCode::bad_file, {"layer.x", part}, [&] { float_row().validate(weight, "layer.x"); });
  };
  const auto scales = [](PackedWeight& w) { return w.plane(PlaneRole::scales).bytes.as<uint8_t>(); };
  refused("nvfp4", "row 1, block 1", [&](PackedWeight& w) { scales(w)[7] = 0x7F; });
  refused("nvfp4", "negative", [&](PackedWeight& w) { scales(w)[7] |= 0x80; });
  refused("mxfp4", "non-finite", [&](PackedWeight& w) { scales(w)[3] = 0xFF; });
  refused("nvfp4", "codebook", [](PackedWeight& w) { w.plane(PlaneRole::codebook).bytes.as<float>()[1] = 0.25f; });
  refused("nvfp4", "tensor_scale", [](PackedWeight& w) { w.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = 0; });
  refused("fp8-channel", "row 2, column 40", [](PackedWeight& w) {
    std::vector<uint8_t> codes(96);
    codes[40] = 0xFF;
    table_write_codes(float_row().table(w.scheme), w, 2, codes);
  });
}

/// All codes survive the way through a dialect's tensors, −0 among them.
TEST(SmallFloat, DialectTensorsHoldEveryCode) {
  const FloatNames names{".w", ".s", ".f", true, false};
  for (const Scheme& scheme : float_row().schemes()) {
    constexpr int64_t n = 6, k = 256;
    PackedWeight weight = encode_floats(scheme, test::sample(test::distributions[0], n, k), n, k);
    const TableFormat format = float_row().table(scheme);
    std::vector<uint8_t> codes(k), read(k);
    for (size_t c = 0; c < codes.size(); ++c) {
      const auto code = static_cast<uint8_t>(c % (1u << scheme.bits));
      codes[c] = scheme.bits == 8 && (code & 0x7F) == 0x7F ? uint8_t{0} : code;
    }
    for (int64_t r = 0; r < n; ++r) table_write_codes(format, weight, r, codes);
    table_read_codes(format, weight, n - 1, read);
    EXPECT_EQ(read, codes);
    const auto tensors = encode_small_float(weight, names);
    EXPECT_TRUE(bytes_equal(decode_small_float(scheme, n, k, tensors, names), weight)) << to_string(scheme);
  }
}

}  // namespace
}  // namespace w4q::formats
