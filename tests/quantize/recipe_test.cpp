#include "quantize/recipe.h"

#include "support.h"

namespace w4q::quantize {
namespace {

TEST(Glob, MatchesWholeNames) {
  EXPECT_TRUE(glob_match("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(glob_match("*", "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(glob_match("*.up_proj", "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(glob_match("model.layers.[0-3].*", "model.layers.2.self_attn.q_proj"));
  EXPECT_TRUE(glob_match("model.layers.?.*", "model.layers.7.x"));
  EXPECT_TRUE(glob_match("*[qk]_proj", "a.k_proj"));
  EXPECT_FALSE(glob_match("up_proj", "model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(glob_match("*.up", "model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(glob_match("model.layers.?.*", "model.layers.10.x"));
  EXPECT_FALSE(glob_match("model.layers.[!0]*", "model.layers.0.x"));
  EXPECT_TRUE(glob_match("", ""));
  EXPECT_FALSE(glob_match("", "a"));
}

TEST(Glob, ZeroBytesDoNotCutNamesShort) {
  using namespace std::string_view_literals;
  EXPECT_FALSE(glob_match("lm_head", "lm_head\0x"sv));
  EXPECT_FALSE(glob_match("lm_head\0x"sv, "lm_head"));
}

TEST(Recipe, FirstMatchWinsAndNoMatchIsNull) {
  const formats::Scheme three{formats::SchemeFamily::kbit, 3, 32, formats::ScaleType::e4m4};
  const formats::Scheme five{formats::SchemeFamily::kbit, 5, 32, formats::ScaleType::f16};
  const Recipe recipe{{{"*.down_proj", five}, {"model.layers.0.*", std::nullopt}, {"model.layers.*", three}}};
  ASSERT_NE(recipe.find("model.layers.0.mlp.down_proj"), nullptr);
  EXPECT_EQ(recipe.find("model.layers.0.mlp.down_proj")->scheme, five);
  EXPECT_EQ(recipe.find("model.layers.0.mlp.up_proj")->scheme, std::nullopt);
  EXPECT_EQ(recipe.find("model.layers.1.mlp.up_proj")->scheme, three);
  EXPECT_EQ(recipe.find("lm_head"), nullptr);
}

}  // namespace
}  // namespace w4q::quantize
