#include "model/text_normalizer.h"

#include <array>
#include <utility>

#include "model/characters.h"

namespace w4q::model {
namespace {

constexpr int max_depth = 20;
constexpr std::array<std::pair<std::string_view, UnicodeForm>, 4> forms{{
    {"NFC", UnicodeForm::nfc},
    {"NFD", UnicodeForm::nfd},
    {"NFKC", UnicodeForm::nfkc},
    {"NFKD", UnicodeForm::nfkd},
}};

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

}  // namespace

TextNormalizer TextNormalizer::parse(const std::optional<JsonNode>& node) {
  TextNormalizer result;
  if (node) result.add(*node, 0);
  return result;
}

void TextNormalizer::add(const JsonNode& node, int depth) {
  if (depth > max_depth) throw node.error(ErrorCode::unsupported, "sequences are nested too deeply");
  const std::string& type = node.type();
  for (const auto& [name, form] : forms) {
    if (type == name) {
      steps_.emplace_back(form);
      return;
    }
  }
  if (type == "Sequence") {
    for (const auto& child : node.at("normalizers").items()) add(child, depth + 1);
  } else if (type == "Prepend") {
    steps_.emplace_back(Prepend{node.at("prepend").string()});
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{TextPattern::parse(node.at("pattern")), node.at("content").string()});
  } else if (type == "Strip") {
    steps_.emplace_back(Strip{node.at("strip_left").boolean(), node.at("strip_right").boolean()});
  } else if (type == "Lowercase") {
    steps_.emplace_back(Lowercase{});
  } else {
    throw node.unknown_type("normalizer", "NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Lowercase, Sequence");
  }
}

std::string TextNormalizer::run(const Step& step, std::string text, WorkBudget& budget) {
  return std::visit(
      Overloaded{
          [&](UnicodeForm form) { return unicode_normalized(text, form); },
          [&](const Prepend& prepend) { return text.empty() ? text : prepend.text + text; },
          [&](const Replace& replace) { return replace.pattern.replace_all(text, replace.content, budget); },
          [&](const Strip& strip) {
            if (strip.right) text.erase(trailing_white_space(text));
            if (strip.left) text.erase(0, leading_white_space(text));
            return text;
          },
          [&](const Lowercase&) { return unicode_lowercase(text); },
      },
      step);
}

std::string TextNormalizer::apply(std::string_view text, WorkBudget& budget) const {
  std::string result(text);
  for (const Step& step : steps_) {
    result = run(step, std::move(result), budget);
    budget.produce(result.size());
  }
  return result;
}

}  // namespace w4q::model
