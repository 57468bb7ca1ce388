#include "formats/scale_codec.h"

#include <gtest/gtest.h>

#include <cmath>

namespace w4q::formats {
namespace {

class ScaleTypes : public testing::TestWithParam<ScaleType> {};
INSTANTIATE_TEST_SUITE_P(Every, ScaleTypes,
                         testing::Values(ScaleType::e4m4, ScaleType::f16, ScaleType::bf16, ScaleType::f32,
                                         ScaleType::e4m3, ScaleType::e8m0),
                         [](const auto& param) { return std::string(to_string(param.param)); });

TEST_P(ScaleTypes, RowSaysWhatTheTypeCan) {
  const ScaleCodec& codec = scale_codec(GetParam());
  for (const float value : {codec.largest, codec.smallest_normal, codec.decode(1)}) {
    EXPECT_EQ(codec.decode(codec.encode(value)), value);
  }
  EXPECT_EQ(codec.decode(codec.encode(std::numeric_limits<float>::max())), codec.largest);
  EXPECT_EQ(codec.decode(codec.encode(std::nextafter(codec.overflow, 0.0f))), codec.largest);
  EXPECT_FALSE(store_scale(std::nextafter(codec.overflow, 0.0f), GetParam()).saturated);
  EXPECT_TRUE(store_scale(codec.overflow, GetParam()).saturated);
  for (int i = 0; i < 10'000; ++i) {
    const float value = codec.smallest_normal * std::exp2(static_cast<float>(i) * 0.0011f);
    const double error = std::abs(double{codec.decode(codec.encode(value))} - value);
    ASSERT_LE(error, codec.roundoff * double{value}) << value;
  }
}

TEST_P(ScaleTypes, PlanesHoldThem) {
  const ScaleCodec& codec = scale_codec(GetParam());
  constexpr size_t count = 40;
  Plane plane{{PlaneRole::scales, codec.dtype, {count}},
              Buffer(count * static_cast<size_t>(dtype_bits(codec.dtype)) / 8)};
  for (size_t i = 0; i < count; ++i) put_scale(plane, i, codec.encode(0.25f * static_cast<float>(i + 1)));
  std::vector<float> loaded(count - 3);
  load_scales(plane, 3, loaded);
  for (size_t i = 0; i < count; ++i) {
    const float expected = decode_scale(codec.encode(0.25f * static_cast<float>(i + 1)), GetParam());
    EXPECT_EQ(load_scale(plane, i), expected);
    if (i >= 3) {
      EXPECT_EQ(loaded[i - 3], expected);
    }
  }
}

TEST(StoreScale, StaysBelowTheLimitOfItsCaller) {
  const StoredScale scale = store_scale(3.0, ScaleType::f32, 2.0f);
  EXPECT_EQ(scale.value, 2.0f);
  EXPECT_TRUE(scale.saturated);
  EXPECT_FALSE(store_scale(2.0, ScaleType::f16, 2.0f).saturated);
}

}  // namespace
}  // namespace w4q::formats
