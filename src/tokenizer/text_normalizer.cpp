#include "tokenizer/text_normalizer.h"

#include <array>
#include <utility>

#include "tokenizer/characters.h"

namespace w4q::tokenizer {
namespace {

constexpr int max_depth = 20;
constexpr std::array<std::pair<std::string_view, UnicodeForm>, 4> forms{{
    {"NFC", UnicodeForm::nfc},
    {"NFD", UnicodeForm::nfd},
    {"NFKC", UnicodeForm::nfkc},
    {"NFKD", UnicodeForm::nfkd},
}};

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

std::string TextNormalizer::run(UnicodeForm form, const std::string& text, text::WorkBudget& /*budget*/) {
  return unicode_normalized(text, form);
}

std::string TextNormalizer::run(const Prepend& step, const std::string& text, text::WorkBudget& /*budget*/) {
  return text.empty() ? text : step.text + text;
}

std::string TextNormalizer::run(const Replace& step, const std::string& text, text::WorkBudget& budget) {
  return step.pattern.replace_all(text, step.content, budget);
}

std::string TextNormalizer::run(const Strip& step, const std::string& text, text::WorkBudget& /*budget*/) {
  const size_t end = step.right ? trailing_white_space(text) : text.size();
  const size_t begin = step.left ? leading_white_space(std::string_view(text).substr(0, end)) : 0;
  return text.substr(begin, end - begin);
}

std::string TextNormalizer::run(const Lowercase& /*step*/, const std::string& text, text::WorkBudget& /*budget*/) {
  return unicode_lowercase(text);
}

std::string TextNormalizer::apply(std::string_view text, text::WorkBudget& budget) const {
  std::string result(text);
  for (const Step& step : steps_) {
    result = std::visit([&](const auto& kind) { return run(kind, result, budget); }, step);
    budget.produce(result.size());
  }
  return result;
}

}  // namespace w4q::tokenizer
