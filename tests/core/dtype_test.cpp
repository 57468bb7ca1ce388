#include "core/dtype.h"

#include <string>

#include "support.h"

namespace w4q {
namespace {

TEST(DType, NamesComeBackAndAreCaseSensitive) {
  for (int i = 0; i < dtype_count; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
    EXPECT_GE(dtype_bits(dtype), 4);
  }
  EXPECT_EQ(parse_dtype("bf16"), std::nullopt);
  EXPECT_EQ(parse_dtype(""), std::nullopt);
}

TEST(DType, WidthsThatFollowFromTheName) {
  for (int i = 0; i < dtype_count; ++i) {
    const std::string name(dtype_name(static_cast<DType>(i)));
    const auto digits = name.find_first_of("0123456789");
    if (digits == std::string::npos) continue;
    const size_t end = name.find_first_not_of("0123456789", digits);
    EXPECT_EQ(dtype_bits(static_cast<DType>(i)), std::stoi(name.substr(digits, end - digits))) << name;
  }
}

TEST(DType, WeightTypes) {
  EXPECT_TRUE(is_weight_dtype(DType::bf16));
  EXPECT_TRUE(is_weight_dtype(DType::f16));
  EXPECT_TRUE(is_weight_dtype(DType::f32));
  EXPECT_FALSE(is_weight_dtype(DType::f64));
  EXPECT_FALSE(is_weight_dtype(DType::i32));
}

}  // namespace
}  // namespace w4q
