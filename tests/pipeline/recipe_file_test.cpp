#include "pipeline/recipe_file.h"

#include "support.h"

namespace w4q::pipeline {
namespace {

quantize::Recipe parse(std::string_view text) { return parse_recipe(io::parse_json(text, "r.json"), "r.json"); }

TEST(RecipeFile, RulesInOrderAndKeep) {
  const auto recipe =
      parse(R"({"rules": [{"match": "a.*", "scheme": "keep"}, {"match": "*", "scheme": "kbit5-b32-f16"}]})");
  ASSERT_EQ(recipe.rules.size(), 2u);
  EXPECT_FALSE(recipe.find("a.b")->scheme.has_value());
  EXPECT_EQ(formats::to_string(*recipe.find("b")->scheme), "kbit5-b32-f16");
}

TEST(RecipeFile, StepsStandBesideTheRules) {
  const auto recipe = parse(R"({"steps": "rotate64 → search", "rules": [{"match": "*", "scheme": "kbit3-b32-e4m4"}]})");
  ASSERT_TRUE(recipe.steps);
  ASSERT_TRUE(recipe.steps->has(quantize::StepKind::rotate));
  EXPECT_EQ(recipe.steps->find(quantize::StepKind::rotate)->block, 64);
  EXPECT_EQ(to_json(parse_recipe(to_json(recipe), "again")), to_json(recipe));
  test::expect_error(ErrorCode::bad_file, {"steps"}, [] { parse(R"({"steps": 3, "rules": []})"); });
}

TEST(RecipeFile, ALineHasASchemeAndSteps) {
  EXPECT_TRUE(is_recipe_line("kbit3: search"));
  EXPECT_FALSE(is_recipe_line("kbit3.json"));
  const auto line = parse_recipe_line("kbit3: awq → rotate128 → lloyd+search → feedback");
  EXPECT_EQ(formats::to_string(line.passes), "kbit3-b32-e4m4");
  EXPECT_EQ(quantize::to_string(line.steps), "awq → rotate128 → lloyd+search → feedback");
  EXPECT_EQ(formats::to_string(parse_recipe_line("int4:clip").passes), "int4-g128-f16-asym");
  EXPECT_EQ(formats::to_string(parse_recipe_line("kbit5-b32-f16: none").passes), "kbit5-b32-f16");
  EXPECT_EQ(formats::to_string(parse_recipe_line("rotated4: search → norms").passes), "rotated4-d128");
  const std::string two = "rotated4-d64+rotated2-d64";
  EXPECT_EQ(formats::to_string(parse_recipe_line(two + ": feedback").passes), two);
  test::expect_error(ErrorCode::unsupported, {"kbit9"}, [] { parse_recipe_line("kbit9: search"); });
}

/// A misspelt "steps" would be no steps.
TEST(RecipeFile, NothingIsPassedOver) {
  test::expect_error(ErrorCode::bad_file, {"r.json", "step", "unknown key"},
                     [] { parse(R"({"step": "search", "rules": []})"); });
  test::expect_error(ErrorCode::unsupported, {"kbit9", "at r.json: rule 1"},
                     [] { parse(R"({"rules": [{"match": "*", "scheme": "kbit9-b32-e4m4"}]})"); });
  test::expect_error(ErrorCode::bad_argument, {"guess", "at r.json: \"steps\""},
                     [] { parse(R"({"steps": "guess", "rules": []})"); });
}

TEST(RecipeFile, MistakesNameTheRule) {
  const auto refused = [](std::string_view text, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::bad_file, parts, [&] { parse(text); });
  };
  refused("3", {"r.json", "rules"});
  refused(R"({"rules": {}})", {"rules"});
  refused(R"({"rules": [7]})", {"rule 1", "object"});
  refused(R"({"rules": [{"match": "*", "scheme": "keep"}, {"scheme": "keep"}]})", {"rule 2", "match"});
  refused(R"({"rules": [{"match": "*", "scheme": "keep", "bits": 3}]})", {"rule 1", "bits"});
}

}  // namespace
}  // namespace w4q::pipeline
