#include "pipeline/recipe_file.h"

#include <algorithm>
#include <initializer_list>

#include "core/error.h"
#include "core/text.h"
#include "io/files.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view form = R"(a recipe is {"rules": [{"match": "*.mlp.*", "scheme": "kbit3-b32-e4m4"}, …]})";

/// What `parse` gives; its errors name the place in the file too.
template <class Parse>
auto parse_at(const std::string& place, const Parse& parse) {
  try {
    return parse();
  } catch (Error& error) {
    throw error.detail("at " + place);
  }
}

void refuse_other_keys(const io::Json& json, std::initializer_list<std::string_view> known, const std::string& place) {
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(known, key) != known.end()) continue;
    throw Error(ErrorCode::bad_file, concat(place, ": unknown key \"", printable(key), "\"")).hint(form);
  }
}

quantize::RecipeRule parse_rule(const io::Json& json, const std::string& place) {
  const auto text = [&](const char* key) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_string()) {
      throw Error(ErrorCode::bad_file, concat(place, ": \"", key, "\" is missing or not a string")).hint(form);
    }
    return found->get<std::string>();
  };
  if (!json.is_object()) throw Error(ErrorCode::bad_file, place + ": not an object").hint(form);
  refuse_other_keys(json, {"match", "scheme"}, place);
  const std::string scheme = text("scheme");
  quantize::RecipeRule rule{text("match"), std::nullopt};
  if (scheme == "keep") return rule;
  rule.residual = parse_at(place, [&] { return formats::parse_schemes(scheme); });
  rule.scheme = rule.residual.front();
  rule.residual.erase(rule.residual.begin());
  return rule;
}

}  // namespace

quantize::Recipe parse_recipe(const io::Json& json, std::string_view source) {
  const auto rules = json.is_object() ? json.find("rules") : json.end();
  if (!json.is_object() || rules == json.end() || !rules->is_array()) {
    throw Error(ErrorCode::bad_file, concat(source, ": no array \"rules\"")).hint(form);
  }
  refuse_other_keys(json, {"rules", "steps"}, std::string(source));
  quantize::Recipe recipe;
  if (const auto steps = json.find("steps"); steps != json.end()) {
    if (!steps->is_string()) throw Error(ErrorCode::bad_file, concat(source, ": \"steps\" is not a string")).hint(form);
    recipe.steps =
        parse_at(concat(source, ": \"steps\""), [&] { return quantize::parse_steps(steps->get<std::string>()); });
  }
  for (const auto& rule : *rules) {
    recipe.rules.push_back(parse_rule(rule, concat(source, ": rule ", recipe.rules.size() + 1)));
  }
  return recipe;
}

io::Json to_json(const quantize::Recipe& recipe) {
  io::Json rules = io::Json::array();
  for (const auto& rule : recipe.rules) {
    std::vector<formats::Scheme> passes = rule.residual;
    if (rule.scheme) passes.insert(passes.begin(), *rule.scheme);
    rules.push_back({{"match", rule.glob}, {"scheme", passes.empty() ? "keep" : formats::to_string(passes)}});
  }
  io::Json json = io::Json::object();
  if (recipe.steps) json["steps"] = quantize::to_string(*recipe.steps);
  json["rules"] = std::move(rules);
  return json;
}

bool is_recipe_line(std::string_view text) noexcept {
  constexpr std::string_view families[] = {"kbit",  "int",  "rotated", "trellis", "exl3",
                                           "nvfp4", "mxfp", "fp8-",    "nf4",     "lut"};
  const bool family = std::ranges::any_of(families, [&](std::string_view name) { return text.starts_with(name); });
  return family && text.find(':') != std::string_view::npos;
}

RecipeLine parse_recipe_line(std::string_view text) {
  const size_t colon = text.find(':');
  std::string name(text.substr(0, colon));
  if (name.find('-') == std::string::npos) {
    if (name.starts_with("kbit")) name += "-b32-e4m4";
    if (name.starts_with("rotated")) name += "-d128";
    if (name.starts_with("int")) name += "-g128-f16-asym";
  }
  auto schemes = formats::parse_schemes(name);
  auto steps = quantize::parse_steps(text.substr(colon + 1));
  // Norms are those of the scheme, or else of the model.
  const auto& norms = quantize::step_row(quantize::StepKind::fit_norms);
  const auto has_norms = [&](const formats::Scheme& scheme) { return norms.accepts(scheme, nullptr); };
  if (steps.has(norms.kind) && std::ranges::none_of(schemes, has_norms)) {
    steps.remove(norms.kind);
    steps.add({quantize::StepKind::distill_norms});
  }
  return {std::move(schemes), std::move(steps)};
}

quantize::Recipe read_recipe(const std::filesystem::path& path) {
  return parse_recipe(io::parse_json(io::read_file(path, io::max_config_bytes), path.native()), path.string());
}

}  // namespace w4q::pipeline
