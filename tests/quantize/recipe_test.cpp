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

TEST(Steps, PrintAndParse) {
  for (const char* text :
       {"awq → rotate128 → lloyd+search → feedback", "rotate32 → search", "lloyd", "clip", "awq → feedback",
        "search → feedback → norms", "fold", "fold → awq → rotate128 → lloyd+search → feedback", "none"}) {
    EXPECT_EQ(to_string(parse_steps(text)), text);
  }
  EXPECT_EQ(parse_steps(" awq->rotate64 , search "), (Steps{.awq = true, .rotate = 64, .search = true}));
}

TEST(Steps, MistakesNameTheStep) {
  const auto refused = [](const char* text, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::bad_argument, parts, [&] { parse_steps(text); });
  };
  refused("", {"no such step"});
  refused("awq → polish", {"polish", "no such step", "rotate128"});
  refused("feedback → awq", {"awq", "too late"});
  refused("awq → awq", {"twice"});
  refused("awq → fold", {"fold", "too late"});
  refused("rotate96", {"rotate96", "32, 64"});
  refused("rotate", {"rotate"});
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
