#include "tokenizer/text_pattern.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/text.h"
#include "text/utf8.h"

namespace w4q::tokenizer {
namespace {

constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> behavior_names{{
    {"Removed", SplitBehavior::removed},
    {"Isolated", SplitBehavior::isolated},
    {"MergedWithPrevious", SplitBehavior::merged_with_previous},
    {"MergedWithNext", SplitBehavior::merged_with_next},
    {"Contiguous", SplitBehavior::contiguous},
}};

void find_literal(std::string_view text, std::string_view what, std::vector<text::TextRange>& matches) {
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + what.size())) {
    matches.push_back({at, at + what.size()});
  }
}

void find_regex(std::string_view text, const text::Regex& regex, text::WorkBudget& budget,
                std::vector<text::TextRange>& matches) {
  size_t from = 0;
  while (from <= text.size()) {
    const auto match = regex.search(text, from, budget);
    if (!match) return;
    if (match->size() == 0 && !matches.empty() && matches.back().end == match->end) {
      from += from < text.size() ? text::utf8_size(text[from]) : 1;
    } else {
      matches.push_back(*match);
      from = match->end;
    }
  }
}

/// Matches and the text between them, in order.
void list_parts(std::string_view text, const std::vector<text::TextRange>& matches, bool invert,
                std::vector<MatchPart>& parts) {
  parts.clear();
  size_t end = 0;
  for (const text::TextRange& match : matches) {
    if (end != match.begin) parts.push_back({{end, match.begin}, invert});
    parts.push_back({match, !invert});
    end = match.end;
  }
  if (end != text.size()) parts.push_back({{end, text.size()}, invert});
}

/// Joins each part to the one before it where `joins(part, previous)`.
template <class Joins>
void join_to_previous(const std::vector<MatchPart>& parts, Joins&& joins, std::vector<text::TextRange>& pieces) {
  const size_t first = pieces.size();
  bool previous = false;
  for (const MatchPart& part : parts) {
    if (joins(part.is_match, previous) && pieces.size() > first) {
      pieces.back().end = part.range.end;
    } else {
      pieces.push_back(part.range);
    }
    previous = part.is_match;
  }
}

/// The first of several matches in a row, seen from the right, joins what follows it.
void join_to_next(const std::vector<MatchPart>& parts, std::vector<text::TextRange>& pieces) {
  const size_t first = pieces.size();
  bool next = false;
  for (size_t i = parts.size(); i-- > 0;) {
    if (parts[i].is_match && !next && pieces.size() > first) {
      pieces.back().begin = parts[i].range.begin;
    } else {
      pieces.push_back(parts[i].range);
    }
    next = parts[i].is_match;
  }
  std::reverse(pieces.begin() + static_cast<std::ptrdiff_t>(first), pieces.end());
}

}  // namespace

TextPattern TextPattern::literal(std::string text) {
  TextPattern result;
  if (text.empty()) return regex("", "empty pattern");
  result.literal_ = std::move(text);
  return result;
}

TextPattern TextPattern::regex(std::string_view pattern, std::string_view place) {
  TextPattern result;
  result.regex_.emplace(pattern, place);
  return result;
}

TextPattern TextPattern::parse(const JsonNode& node) {
  if (const auto text = node.find("String")) return literal(text->string());
  const JsonNode pattern = node.at("Regex");
  return regex(pattern.string(), pattern.place());
}

void TextPattern::find_all(std::string_view text, text::WorkBudget& budget,
                           std::vector<text::TextRange>& matches) const {
  matches.clear();
  if (regex_) {
    find_regex(text, *regex_, budget, matches);
  } else {
    find_literal(text, literal_, matches);
  }
}

std::string TextPattern::replace_all(std::string_view text, std::string_view content, text::WorkBudget& budget) const {
  if (text.empty()) return {};
  std::vector<text::TextRange> matches;
  find_all(text, budget, matches);
  size_t size = text.size() + matches.size() * content.size();
  for (const text::TextRange& match : matches) size -= match.size();
  budget.produce(size);
  std::string result;
  result.reserve(size);
  size_t end = 0;
  for (const text::TextRange& match : matches) {
    result.append(text.substr(end, match.begin - end)).append(content);
    end = match.end;
  }
  return result.append(text.substr(end));
}

SplitBehavior parse_split_behavior(const JsonNode& node) {
  for (const auto& [name, behavior] : behavior_names) {
    if (node.string() == name) return behavior;
  }
  throw node.wrong_type("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

void split_at(std::string_view text, const std::vector<text::TextRange>& matches, SplitBehavior behavior, bool invert,
              std::vector<MatchPart>& parts, std::vector<text::TextRange>& pieces) {
  list_parts(text, matches, invert, parts);
  const size_t first = pieces.size();
  switch (behavior) {
    case SplitBehavior::removed:
      for (const auto& part : parts) {
        if (!part.is_match) pieces.push_back(part.range);
      }
      break;
    case SplitBehavior::isolated:
      for (const auto& part : parts) pieces.push_back(part.range);
      break;
    case SplitBehavior::merged_with_previous:
      join_to_previous(
          parts, [](bool match, bool previous) { return match && !previous; }, pieces);
      break;
    case SplitBehavior::merged_with_next:
      join_to_next(parts, pieces);
      break;
    case SplitBehavior::contiguous:
      join_to_previous(
          parts, [](bool match, bool previous) { return match == previous; }, pieces);
      break;
  }
  const auto empty = [](const text::TextRange& piece) { return piece.size() == 0; };
  pieces.erase(std::remove_if(pieces.begin() + static_cast<std::ptrdiff_t>(first), pieces.end(), empty), pieces.end());
}

}  // namespace w4q::tokenizer
