#include <algorithm>
#include <limits>
#include <unordered_map>

#include "core/error.h"
#include "core/text.h"
#include "gguf/tokenizer_parts.h"
#include "text/utf8.h"

namespace w4q::gguf {
namespace {

/// Sentence-piece trains pieces of at most some hundred bytes. The limit bounds the work that a hostile file can ask
/// for, which grows with the square of a token's length.
constexpr size_t longest_piece = 1024;

using IdOfText = std::unordered_map<std::string_view, size_t>;

IdOfText normal_tokens(std::span<const GgufToken> tokens) {
  IdOfText ids;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (tokens[id].type == GgufTokenType::normal) ids.emplace(tokens[id].text, id);
  }
  return ids;
}

/// The ids of all pairs that make `text`, ordered by them.
std::vector<std::pair<size_t, size_t>> pairs_of(std::string_view text, const IdOfText& ids) {
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t cut = text::utf8_size(text[0]); cut < text.size(); cut += text::utf8_size(text[cut])) {
    const auto left = ids.find(text.substr(0, cut)), right = ids.find(text.substr(cut));
    if (left != ids.end() && right != ids.end()) pairs.emplace_back(left->second, right->second);
  }
  std::ranges::sort(pairs);
  return pairs;
}

/// For each token the pairs that make it.
std::vector<std::vector<std::pair<size_t, size_t>>> all_pairs(std::span<const GgufToken> tokens,
                                                              std::string_view source) {
  const IdOfText ids = normal_tokens(tokens);
  std::vector<std::vector<std::pair<size_t, size_t>>> result(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    const auto& [text, type] = tokens[id];
    if (type != GgufTokenType::normal || text.empty()) continue;
    if (text.size() > longest_piece) {
      throw Error(ErrorCode::unsupported, concat(printable(source), ": token ", id, " has ", text.size(), " bytes"));
    }
    result[id] = pairs_of(text, ids);
  }
  return result;
}

}  // namespace

io::Json byte_level_component() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
}

io::Json piece_normalizer(bool prefix) {
  const io::Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", piece_space}};
  if (!prefix) return replace;
  const io::Json prepend = {{"type", "Prepend"}, {"prepend", piece_space}};
  return {{"type", "Sequence"}, {"normalizers", io::Json::array({prepend, replace})}};
}

io::Json piece_decoder(bool prefix) {
  io::Json steps = {{{"type", "Replace"}, {"pattern", {{"String", piece_space}}}, {"content", " "}},
                    {{"type", "ByteFallback"}},
                    {{"type", "Fuse"}}};
  if (prefix) steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  return {{"type", "Sequence"}, {"decoders", std::move(steps)}};
}

PieceMerges merges_of_pieces(std::span<const GgufToken> tokens, std::span<const float> scores,
                             std::string_view source) {
  const auto pairs = all_pairs(tokens, source);
  std::vector<size_t> order;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!pairs[id].empty()) order.push_back(id);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  PieceMerges merges;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && !(scores[order[i]] < scores[order[i - 1]])) {
      throw Error(ErrorCode::unsupported, concat(printable(source), ": two tokens have one score"))
          .detail(concat("tokens ", order[i - 1], " and ", order[i], ", score ", scores[order[i]],
                         ": which pair merges first depends on the place, which tokenizer.json cannot say"));
    }
    for (const auto& [left, right] : pairs[order[i]]) merges.emplace_back(tokens[left].text, tokens[right].text);
  }
  return merges;
}

std::vector<float> scores_of_merges(std::span<const GgufToken> tokens, const PieceMerges& merges,
                                    std::string_view source) {
  const auto refuse = [&](std::string_view what, std::string_view detail) {
    return Error(ErrorCode::unsupported, concat(printable(source), ": merges that scores cannot express: ", what))
        .detail(detail);
  };
  const IdOfText ids = normal_tokens(tokens);
  auto pairs = all_pairs(tokens, source);
  std::vector<float> scores(tokens.size(), 0);
  std::vector<bool> seen(tokens.size(), false);
  size_t current = tokens.size();
  float score = 0;
  for (const auto& [left, right] : merges) {
    const auto found = ids.find(left + right);
    if (found == ids.end() || !ids.contains(left) || !ids.contains(right)) {
      throw refuse("one needs a token that is not plain text",
                   concat("\"", printable(left), "\" and \"", printable(right), "\""));
    }
    const size_t id = found->second;
    if (id != current && seen[id]) {
      throw refuse("those that make one token are not next to each other",
                   concat("token \"", printable(left + right), "\""));
    }
    if (id != current) score -= 1;
    current = id;
    seen[id] = true;
    scores[id] = score;
    std::erase(pairs[id], std::pair(ids.at(left), ids.at(right)));
  }
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!pairs[id].empty()) {
      const auto [left, right] = pairs[id].front();
      throw refuse("every pair that makes a token would merge",
                   concat("\"", printable(tokens[left].text), "\" and \"", printable(tokens[right].text), "\" do not"));
    }
    // Characters arise from nothing; sentence-piece puts them behind all others.
    if (!seen[id] && tokens[id].type == GgufTokenType::normal) scores[id] = (score -= 1);
  }
  return scores;
}

}  // namespace w4q::gguf
