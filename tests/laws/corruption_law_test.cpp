// Planes from a hostile file: validating and unpacking either accept or throw an Error, and what is accepted decodes
// to finite numbers. Run under the sanitizers this finds every step outside a plane.
#include <optional>

#include "formats/scale_codec.h"
#include "laws/registries.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using formats::Plane;

uint64_t draw(uint64_t round, uint64_t what) { return random_bits(99, round * 16 + what); }

/// Damages one thing: a byte, a size, a type, a shape, a plane, n or k. What an earlier damage has emptied stays empty.
void corrupt(PackedWeight& weight, uint64_t round) {
  if (weight.planes.empty()) return;
  Plane& plane = weight.planes[draw(round, 0) % weight.planes.size()];
  if (plane.spec.shape.empty() || plane.bytes.size() == 0) return;
  switch (draw(round, 1) % 10) {
    case 0:
      plane.bytes = Buffer(draw(round, 2) % (2 * plane.bytes.size()));
      return;
    case 1:
      plane.spec.dtype = static_cast<DType>(draw(round, 2) % dtype_count);
      return;
    case 2:
      plane.spec.shape.resize(draw(round, 2) % 6, static_cast<int64_t>(draw(round, 3)));
      return;
    case 3:
      plane.spec.shape[draw(round, 2) % plane.spec.shape.size()] = static_cast<int64_t>(draw(round, 3));
      return;
    case 4:
      weight.planes.erase(weight.planes.begin() + static_cast<int64_t>(draw(round, 2) % weight.planes.size()));
      return;
    case 5:
      (draw(round, 2) % 2 == 0 ? weight.n : weight.k) += static_cast<int64_t>(draw(round, 3) % 65) - 32;
      return;
    case 6:
      (draw(round, 2) % 2 == 0 ? weight.n : weight.k) = static_cast<int64_t>(draw(round, 3));
      return;
    default:
      plane.bytes.data()[draw(round, 2) % plane.bytes.size()] = static_cast<std::byte>(draw(round, 3));
  }
}

class CorruptionLaw : public testing::TestWithParam<test::SchemeAndLayout> {};
INSTANTIATE_TEST_SUITE_P(Every, CorruptionLaw, testing::ValuesIn(test::every_scheme_and_layout()),
                         [](const auto& param) {
                           return test::test_name(to_string(param.param.first) + "_" + param.param.second);
                         });

TEST_P(CorruptionLaw, DamagedPlanesAreAcceptedOrRefusedNeverMisread) {
  const auto& [scheme, layout_name] = GetParam();
  const repack::LayoutRow& layout = repack::layout_row(layout_name);
  const auto& row = formats::scheme_row(scheme.family);
  // Ragged, and most of a tile, so that a damaged byte is as likely a code as padding.
  constexpr int64_t n = 60;
  constexpr int64_t k = 70;
  const PackedWeight packed = layout.pack(test::encoded(scheme, test::sample(test::distributions[0], n, k), n, k));
  int refused = 0;
  int accepted = 0;
  for (uint64_t round = 0; round < 300; ++round) {
    PackedWeight damaged = packed.clone();
    for (uint64_t i = 0; i <= draw(round, 9) % 2; ++i) corrupt(damaged, 2 * round + i);
    try {
      const PackedWeight canonical = layout.unpack(damaged, "w");
      row.validate(canonical, "w");
      ASSERT_TRUE(bytes_equal(layout.pack(canonical), damaged));
      for (float value : test::decode(canonical)) ASSERT_TRUE(std::isfinite(value));
      ++accepted;
    } catch (const Error& error) {
      ASSERT_NE(error.code(), ErrorCode::internal) << error.what();
      ++refused;
    }
  }
  // Both happen: a byte of a code is as good as another, a shape is not.
  EXPECT_GT(refused, 90);
  EXPECT_GT(accepted, 15);
}

/// What asking planes gives, and what is thrown; empty: nothing.
struct Answer {
  std::optional<float> largest;
  std::string thrown;
};
Answer ask_stored(const formats::SchemeRow& row, const PackedWeight& packed) {
  try {
    return {row.largest_scale(packed, "w"), {}};
  } catch (const Error& error) {
    return {std::nullopt, error.what()};
  }
}
std::string ask_canonical(const formats::SchemeRow& row, const repack::LayoutRow& layout, const PackedWeight& packed) {
  try {
    row.validate(layout.unpack(packed, "w"), "w");
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

TEST_P(CorruptionLaw, PlanesAsTheyStandAreSoundWhereCanonicalOnesAre) {
  const auto& [scheme, layout_name] = GetParam();
  if (scheme.scale == formats::ScaleType::nested) return;  // only canonical planes can be asked
  const repack::LayoutRow& layout = repack::layout_row(layout_name);
  const auto& row = formats::scheme_row(scheme.family);
  constexpr int64_t n = 128, k = 256;  // without padding
  const PackedWeight packed = layout.pack(test::encoded(scheme, test::sample(test::distributions[0], n, k), n, k));
  for (uint64_t round = 0; round < 100; ++round) {
    PackedWeight damaged = packed.clone();
    for (Plane& plane : damaged.planes) {
      if (plane.spec.role == formats::PlaneRole::codes || draw(round, 0) % 4 == 0) continue;
      plane.bytes.data()[draw(round, 1) % plane.bytes.size()] = static_cast<std::byte>(draw(round, 2));
    }
    const auto [largest, thrown] = ask_stored(row, damaged);
    const std::string canonical = ask_canonical(row, layout, damaged);
    EXPECT_EQ(largest.has_value(), canonical.empty()) << canonical;
    EXPECT_TRUE(thrown.empty() || thrown == canonical) << thrown << canonical;
    if (!largest) continue;
    const Plane& scales = damaged.plane(formats::PlaneRole::scales);
    float expected = 0;
    for (int64_t i = 0; i < element_count(scales.spec.shape); ++i) {
      expected = std::max(expected, std::abs(formats::load_scale(scales, static_cast<size_t>(i))));
    }
    EXPECT_EQ(*largest, expected);
  }
}

}  // namespace
}  // namespace w4q
