#include "formats/rotated.h"

#include <bit>
#include <cmath>

#include "formats/rotation.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

Scheme rotated(int bits, int block, ScaleType scale = ScaleType::f16) {
  return {SchemeFamily::rotated, bits, block, scale};
}

PackedWeight encode_rotated(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k) {
  return scheme_row(SchemeFamily::rotated).encode(scheme, values, n, k, normal_codebook(scheme.bits));
}

/// The tables of TurboQuant's project, made by another program.
TEST(Rotated, TablesAreTurboQuants) {
  const auto golden = io::Checkpoint::open(test::testdata() / "golden" / "turboquant.safetensors");
  for (int bits = 2; bits <= 5; ++bits) {
    const auto loaded = golden.load("lloyd_" + std::to_string(bits) + "bit.centroids");
    const auto bytes = loaded->bytes;
    const auto table = normal_codebook(bits);
    ASSERT_EQ(bytes.size(), table.size_bytes());
    EXPECT_TRUE(std::ranges::equal(bytes, std::as_bytes(table))) << bits;
  }
}

TEST(Rotated, NamesOfTheFamily) {
  EXPECT_EQ(parse_scheme("rotated4-d128"), rotated(4, 128));
  EXPECT_EQ(parse_scheme("rotated3-row-e4m4"), rotated(3, whole_row, ScaleType::e4m4));
  EXPECT_EQ(parse_scheme("rotated2-d65536-f32"), rotated(2, 65536, ScaleType::f32));
  for (std::string_view text :
       {"rotated4", "rotated1-d128", "rotated6-d128", "rotated4-d16", "rotated4-d96", "rotated4-d0128", "rotated4-d",
        "rotated4-d131072", "rotated4-d128-f16", "rotated4-d128-bf16", "rotated4-d128-", "rotated4-b128", "rotated4-",
        "rotated4-row-", "rotated4-row-f32-f32", "rotated4-d99999999999", "rotated4-d0"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown scheme", "rotated<2 to 5>"}, [&] { parse_scheme(text); });
  }
}

TEST(Rotated, ThreeBitsTakeThreeBits) {
  const auto bits = [](const Scheme& scheme) {
    return scheme_row(SchemeFamily::rotated).bits_per_weight(scheme, 4096, 4096);
  };
  constexpr double table = 32.0 / (4096.0 * 4096.0);
  EXPECT_DOUBLE_EQ(bits(rotated(3, 128)), 3.125 + 8 * table);
  EXPECT_DOUBLE_EQ(bits(rotated(4, 128, ScaleType::e4m4)), 4.0625 + 16 * table);
  EXPECT_DOUBLE_EQ(bits(rotated(2, whole_row)), 2 + 16.0 / 4096 + 4 * table);
}

/// One value of norm 1 in a group of 32: the norm is the group's, the code the outermost, the others the middle's
/// lower.
TEST(Rotated, BytesOfOneGroup) {
  std::vector<float> values(64, 0.0f);
  values[5] = -2.0f;
  const PackedWeight weight = encode_rotated(rotated(2, 32), values, 1, 64);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  EXPECT_EQ(words[0], ~(1u << 5));  // zero is a tie of codes 1 and 2: the lower
  EXPECT_EQ(words[1], 0u);
  const auto norms = weight.plane(PlaneRole::scales).bytes.as<uint16_t>();
  EXPECT_EQ(norms[0], 0x4000);
  EXPECT_EQ(norms[1], 0);
  const std::vector<float> decoded = test::decode(weight);
  EXPECT_FLOAT_EQ(decoded[5], static_cast<float>(-1.51041758 / std::sqrt(32.0) * 2));
  EXPECT_EQ(std::abs(decoded[40]), 0.0f);
}

/// A ragged group stores √d times its root mean square, as whole ones do.
TEST(Rotated, RaggedGroupsHaveTheScaleOfWholeOnes) {
  const std::vector<float> values(160, 0.25f);
  const PackedWeight weight = encode_rotated(rotated(4, 128, ScaleType::f32), values, 1, 160);
  const auto norms = weight.plane(PlaneRole::scales).bytes.as<float>();
  ASSERT_EQ(norms.size(), 2u);
  EXPECT_FLOAT_EQ(norms[0], norms[1]);
  const std::vector<float> decoded = test::decode(weight);
  EXPECT_EQ(decoded.front(), decoded.back());
}

/// A power of two in the table moves from the norms to the table; other factors do too, but for roundings.
TEST(Rotated, AFactorOfTheTableIsNoOther) {
  const std::vector<float> values = test::sample(test::distributions[0], 3, 200);
  const PackedWeight plain = encode_rotated(rotated(3, 64), values, 3, 200);
  std::vector<float> table(normal_codebook(3).begin(), normal_codebook(3).end());
  for (float& entry : table) entry *= 0x1p-7f;
  const PackedWeight scaled = scheme_row(SchemeFamily::rotated).encode(rotated(3, 64), values, 3, 200, table);
  EXPECT_EQ(test::decode(plain), test::decode(scaled));
}

/// SQNR of N(0, 1) under its own Lloyd–Max quantizer is 9.30, 14.62, 20.22 and 26.01 dB (Max, 1960); groups of 128 do
/// a little better, as their norm says something about them. 5 bits are not fully converged: 25.6 and more.
TEST(Rotated, NormalWeightsAreNearTheLloydMaxBound) {
  constexpr double least[] = {9.28, 14.6, 20.2, 25.6};
  constexpr double most[] = {9.45, 14.8, 20.45, 26.2};
  const std::vector<float> values = test::sample(test::distributions[0], 64, 1024);
  for (int bits = 2; bits <= 5; ++bits) {
    const double found = test::sqnr(values, test::decode(encode_rotated(rotated(bits, 128), values, 64, 1024)));
    EXPECT_GT(found, least[bits - 2]);
    EXPECT_LT(found, most[bits - 2]);
  }
}

/// What a rotation is for: one weight in 32 carries nearly everything, and groups are normal again.
TEST(Rotated, RotatingMakesHeavyTailsNormal) {
  std::vector<float> values = test::sample(test::distributions[4], 16, 512);
  const double before = test::sqnr(values, test::decode(encode_rotated(rotated(4, 128), values, 16, 512)));
  const InputRotation rotation({128, 42}, 512);
  for (size_t row = 0; row < 16; ++row) rotation.rotate(std::span(values).subspan(row * 512, 512));
  const double after = test::sqnr(values, test::decode(encode_rotated(rotated(4, 128), values, 16, 512)));
  EXPECT_LT(before, 16);
  EXPECT_GT(after, 19);
}

TEST(Rotated, ReadersRefuseWhatCannotBe) {
  const auto refuse = [](std::string_view part, auto&& damage) {
    PackedWeight weight = encode_rotated(rotated(4, 64), test::sample(test::distributions[0], 2, 100), 2, 100);
    damage(weight);
    test::expect_error(ErrorCode::bad_file, {"layer.x", part},
                       [&] { scheme_row(SchemeFamily::rotated).validate(weight, "layer.x"); });
  };
  refuse("row 1, block 0", [](PackedWeight& w) { w.plane(PlaneRole::scales).bytes.as<uint16_t>()[2] = 0x7C00; });
  refuse("row 0, block 1", [](PackedWeight& w) { w.plane(PlaneRole::scales).bytes.as<uint16_t>()[1] = 0x8001; });
  refuse("within fp32", [](PackedWeight& w) {
    for (float& entry : w.plane(PlaneRole::codebook).bytes.as<float>()) entry *= 0x1p125f;
    w.plane(PlaneRole::scales).bytes.as<uint16_t>()[0] = 0x7BFF;
  });
  refuse("padding", [](PackedWeight& w) { w.plane(PlaneRole::codes).bytes.as<uint32_t>()[15] |= 1u << 31; });
  refuse("ascend", [](PackedWeight& w) { w.plane(PlaneRole::codebook).bytes.as<float>()[3] = 5; });
  refuse("no such scheme", [](PackedWeight& w) { w.scheme.block = 48; });
  refuse("no such scheme", [](PackedWeight& w) { w.scheme.asymmetric = true; });
  refuse("scales", [](PackedWeight& w) { w.scheme.block = 32; });
}

}  // namespace
}  // namespace w4q::formats
