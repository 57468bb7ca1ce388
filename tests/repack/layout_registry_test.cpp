#include "repack/layout_registry.h"

#include <gtest/gtest.h>

#include "support.h"

namespace w4q::repack {
namespace {

constexpr formats::Scheme kbit4{formats::SchemeFamily::kbit, 4, 32, formats::ScaleType::e4m4};

TEST(LayoutRegistry, FindsRowsByNameAndTarget) {
  EXPECT_EQ(layout_row("canonical").name, "canonical");
  for (std::string_view target : {"sm80", "sm89", "sm90"}) {
    EXPECT_EQ(layout_for_target(target, kbit4, 11000, 4097).name, "kbit-fragment");
  }
  EXPECT_EQ(known_targets(), (std::vector<std::string>{"sm80", "sm89", "sm90"}));
}

TEST(LayoutRegistry, NamesWhatExists) {
  test::expect_error(ErrorCode::bad_argument, {"zigzag", "canonical, kbit-fragment, kbit-tile"},
                     [] { layout_row("zigzag"); });
  test::expect_error(ErrorCode::bad_argument, {"sm75", "sm80, sm89, sm90"},
                     [] { layout_for_target("sm75", kbit4, 128, 64); });
  test::expect_error(ErrorCode::bad_argument, {"\"\""}, [] { layout_for_target("", kbit4, 128, 64); });
}

TEST(LayoutRegistry, SaysWhyNothingFits) {
  test::expect_error(ErrorCode::unsupported,
                     {"sm89", "kbit4-b32-e4m4", "kbit-fragment:", "kbit-tile:", "1 … 2^30", "--layout canonical"},
                     [] { layout_for_target("sm89", kbit4, 0, 64); });
  formats::Scheme wide = kbit4;
  wide.block = 64;
  std::string why;
  EXPECT_FALSE(layout_row("kbit-tile").accepts(wide, 128, 64, &why));
  EXPECT_EQ(why, "it holds kbit schemes with blocks of 32 only");
  EXPECT_FALSE(layout_row("kbit-tile").accepts(wide, 128, 64, nullptr));
}

}  // namespace
}  // namespace w4q::repack
