#include "tokenizer/pre_tokenizer.h"

#include <utility>

#include "text/utf8.h"
#include "tokenizer/byte_level.h"

namespace w4q::tokenizer {
namespace {

constexpr int max_depth = 20;

/// How GPT-2 cuts text, which "use_regex" asks for: English contractions, runs of letters, of digits and of anything
/// else, each with one space before it, and white space.
constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Rewrites the words one by one: `write(word, out)` appends the new text of one.
template <class Write>
void rewrite(Words& words, Write&& write) {
  std::string text;
  text.reserve(words.text.size() + words.words.size());
  for (auto& word : words.words) {
    const size_t begin = text.size();
    write(word, std::string_view(words.text).substr(word.range.begin, word.range.size()), text);
    word.range = {begin, text.size()};
  }
  words.text = std::move(text);
}

Metaspace::Prepend parse_prepend_scheme(const JsonNode& node) {
  const std::string& name = node.string();
  if (name == "always") return Metaspace::Prepend::always;
  if (name == "first") return Metaspace::Prepend::first;
  if (name == "never") return Metaspace::Prepend::never;
  throw node.wrong_type("always, first or never");
}

}  // namespace

Metaspace parse_metaspace(const JsonNode& node) {
  Metaspace result{node.at("replacement").string(), Metaspace::Prepend::always, node.boolean_or("split", true)};
  if (result.replacement.empty() || text::utf8_size(result.replacement[0]) != result.replacement.size()) {
    throw node.at("replacement").wrong_type("one character");
  }
  const auto scheme = node.find("prepend_scheme");
  if (scheme) result.prepend = parse_prepend_scheme(*scheme);
  // Older files say it with a flag.
  if (!node.boolean_or("add_prefix_space", true)) {
    if (scheme && result.prepend != Metaspace::Prepend::never) {
      throw node.error(ErrorCode::bad_file, "add_prefix_space and prepend_scheme contradict each other");
    }
    result.prepend = Metaspace::Prepend::never;
  }
  return result;
}

PreTokenizer PreTokenizer::parse(const std::optional<JsonNode>& node) {
  PreTokenizer result;
  if (node) result.add(*node, 0);
  return result;
}

void PreTokenizer::add(const JsonNode& node, int depth) {
  if (depth > max_depth) throw node.error(ErrorCode::unsupported, "sequences are nested too deeply");
  const std::string& type = node.type();
  const auto split = [&](std::string_view pattern, SplitBehavior behavior, bool invert) {
    steps_.emplace_back(Split{TextPattern::regex(pattern, node.place()), behavior, invert});
  };
  if (type == "Sequence") {
    for (const auto& child : node.at("pretokenizers").items()) add(child, depth + 1);
  } else if (type == "Split") {
    steps_.emplace_back(Split{TextPattern::parse(node.at("pattern")), parse_split_behavior(node.at("behavior")),
                              node.boolean_or("invert", false)});
  } else if (type == "ByteLevel") {
    add_byte_level(node);
  } else if (type == "Metaspace") {
    add_metaspace(node);
  } else if (type == "Digits") {
    split(R"(\p{N})", node.boolean_or("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous,
          false);
  } else if (type == "Punctuation") {
    const auto behavior = node.find("behavior");
    split(R"([\p{P}$+<=>^`|~])", behavior ? parse_split_behavior(*behavior) : SplitBehavior::isolated, false);
  } else if (type == "Whitespace") {
    split(R"([\w\x{200C}\x{200D}]+|[^\w\s\x{200C}\x{200D}]+)", SplitBehavior::removed, true);
  } else if (type == "WhitespaceSplit") {
    split(R"(\s)", SplitBehavior::removed, false);
  } else {
    throw node.unknown_type("pre-tokenizer",
                            "Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit, Sequence");
  }
}

void PreTokenizer::add_byte_level(const JsonNode& node) {
  if (node.boolean_or("add_prefix_space", true)) steps_.emplace_back(Prefix{" ", true});
  if (node.boolean_or("use_regex", true)) {
    steps_.emplace_back(Split{TextPattern::regex(gpt2_pattern, node.place()), SplitBehavior::isolated, false});
  }
  steps_.emplace_back(ByteLevel{});
}

void PreTokenizer::add_metaspace(const JsonNode& node) {
  const Metaspace metaspace = parse_metaspace(node);
  steps_.emplace_back(ReplaceSpace{metaspace.replacement});
  if (metaspace.prepend != Metaspace::Prepend::never) {
    steps_.emplace_back(Prefix{metaspace.replacement, metaspace.prepend == Metaspace::Prepend::always});
  }
  if (metaspace.split) {
    steps_.emplace_back(Split{TextPattern::literal(metaspace.replacement), SplitBehavior::merged_with_next, false});
  }
}

Words PreTokenizer::apply(std::string text, bool begins_text, text::WorkBudget& budget) const {
  Words words{std::move(text), {}};
  if (words.text.empty()) return words;
  words.words.push_back({{0, words.text.size()}, begins_text});
  for (const Step& step : steps_) {
    std::visit([&](const auto& kind) { run(kind, words, budget); }, step);
    budget.produce(words.text.size());
  }
  return words;
}

void PreTokenizer::run(const Split& step, Words& words, text::WorkBudget& budget) {
  std::vector<Words::Word> cut;
  std::vector<text::TextRange> matches;
  std::vector<text::TextRange> pieces;
  std::vector<MatchPart> parts;
  for (const auto& word : words.words) {
    const std::string_view text = std::string_view(words.text).substr(word.range.begin, word.range.size());
    pieces.clear();
    step.pattern.find_all(text, budget, matches);
    split_at(text, matches, step.behavior, step.invert, parts, pieces);
    for (const text::TextRange& piece : pieces) {
      cut.push_back(
          {{word.range.begin + piece.begin, word.range.begin + piece.end}, word.begins_text && piece.begin == 0});
    }
  }
  words.words = std::move(cut);
}

void PreTokenizer::run(const Prefix& step, Words& words, text::WorkBudget& /*budget*/) {
  rewrite(words, [&](const Words::Word& word, std::string_view text, std::string& out) {
    if ((step.everywhere || word.begins_text) && !text.starts_with(step.text)) out += step.text;
    out += text;
  });
}

void PreTokenizer::run(const ReplaceSpace& step, Words& words, text::WorkBudget& /*budget*/) {
  rewrite(words, [&](const Words::Word& /*word*/, std::string_view text, std::string& out) {
    for (const char c : text) {
      if (c == ' ') {
        out += step.by;
      } else {
        out += c;
      }
    }
  });
}

void PreTokenizer::run(const ByteLevel& /*step*/, Words& words, text::WorkBudget& /*budget*/) {
  rewrite(words,
          [](const Words::Word& /*word*/, std::string_view text, std::string& out) { append_byte_level(text, out); });
}

}  // namespace w4q::tokenizer
