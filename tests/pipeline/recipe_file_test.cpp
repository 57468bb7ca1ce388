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
