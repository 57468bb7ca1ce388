#include "tokenizer/unigram.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/error.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::tokenizer {
namespace {

/// An unknown character costs so much more than the rarest token.
constexpr double unknown_penalty = 10;
/// Bounds the time of a hostile file; those of published ones are below a hundred bytes.
constexpr size_t max_token_bytes = 1000;

double score_of(const JsonNode& node) {
  if (!node.value().is_number()) throw node.wrong_type("a score");
  const double score = node.value().get<double>();
  if (!std::isfinite(score)) throw node.wrong_type("a finite score");
  return score;
}

}  // namespace

Unigram Unigram::parse(const JsonNode& node) {
  Unigram result;
  result.read_tokens(node.at("vocab"));
  const int64_t end = result.vocabulary_.end_id();
  if (const auto unknown = node.find("unk_id")) {
    result.unknown_id_ = static_cast<int32_t>(unknown->integer(0, std::max<int64_t>(end, 1) - 1));
  }
  result.byte_fallback_ = node.boolean_or("byte_fallback", false);
  for (unsigned byte = 0; byte < result.id_of_byte_.size(); ++byte) {
    std::array<char, 8> name{};
    std::snprintf(name.data(), name.size(), "<0x%02X>", byte);
    result.id_of_byte_[byte] = result.vocabulary_.id(name.data()).value_or(-1);
  }
  return result;
}

void Unigram::read_tokens(const JsonNode& node) {
  std::vector<std::string> tokens;
  double least = 0;
  for (const JsonNode& item : node.items()) {
    const auto pair = item.items();
    if (pair.size() != 2) throw item.wrong_type("a token and its score");
    tokens.push_back(pair[0].string());
    if (tokens.back().size() > max_token_bytes) {
      throw item.error(ErrorCode::unsupported, concat("a token of ", tokens.back().size(), " bytes"))
          .detail(concat("at most ", max_token_bytes, " bytes are read"));
    }
    scores_.push_back(score_of(pair[1]));
    least = scores_.size() == 1 ? scores_[0] : std::min(least, scores_.back());
  }
  if (std::ssize(tokens) > max_token_id) throw node.error(ErrorCode::bad_file, "too many tokens");
  unknown_score_ = least - unknown_penalty;
  vocabulary_ = Vocabulary::of(std::move(tokens));
  for (size_t i = scores_.size(); i-- > 0;) {
    const std::string& token = vocabulary_.tokens()[i];
    if (!token.empty()) tokens_.add(token, static_cast<int32_t>(i));
  }
}

std::vector<Unigram::Way> Unigram::best_ways(std::string_view word) const {
  std::vector<Way> ways(word.size() + 1);
  ways[0].reached = true;
  const auto offer = [&](size_t begin, size_t end, double score, bool known) {
    const double sum = score + ways[begin].score;
    if (!ways[end].reached || sum > ways[end].score) ways[end] = {sum, begin, known, true};
  };
  for (size_t begin = 0; begin < word.size();) {
    const size_t character = text::utf8_size(word[begin]);
    bool alone = false;
    tokens_.each_prefix(word.substr(begin), [&](size_t bytes, int32_t id) {
      offer(begin, begin + bytes, scores_[static_cast<size_t>(id)], id != unknown_id_);
      alone = alone || bytes == character;
    });
    if (!alone) {
      unknown_id();
      offer(begin, begin + character, unknown_score_, false);
    }
    begin += character;
  }
  return ways;
}

int32_t Unigram::unknown_id() const {
  if (unknown_id_ >= 0) return unknown_id_;
  throw Error(ErrorCode::bad_file, "tokenizer.json: /model/unk_id is missing, and the text has an unknown character");
}

void Unigram::encode(std::string_view word, std::vector<int32_t>& ids) const {
  const auto ways = best_ways(word);
  std::vector<text::TextRange> parts;  // from the end; unknown characters in a row are one part
  bool previous_known = true;
  for (size_t end = word.size(); end > 0; end = ways[end].begin) {
    const Way& way = ways[end];
    if (!way.known && !previous_known) {
      parts.back().begin = way.begin;
    } else {
      parts.push_back({way.begin, end});
    }
    previous_known = way.known;
  }
  for (size_t i = parts.size(); i-- > 0;) add_part(word.substr(parts[i].begin, parts[i].size()), ids);
}

void Unigram::add_part(std::string_view part, std::vector<int32_t>& ids) const {
  if (const auto id = vocabulary_.id(part)) return ids.push_back(*id);
  const auto id_of = [&](char c) { return id_of_byte_[static_cast<unsigned char>(c)]; };
  if (byte_fallback_ && std::ranges::all_of(part, [&](char c) { return id_of(c) >= 0; })) {
    for (const char c : part) ids.push_back(id_of(c));
    return;
  }
  ids.push_back(unknown_id());
}

}  // namespace w4q::tokenizer
