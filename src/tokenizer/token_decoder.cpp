#include "tokenizer/token_decoder.h"

#include <charconv>
#include <utility>

#include "core/text.h"
#include "text/utf8.h"
#include "tokenizer/byte_level.h"

namespace w4q::tokenizer {
namespace {

constexpr int max_depth = 20;

/// The byte of a token such as <0x0A>.
std::optional<char> byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  unsigned byte = 0;
  const char* end = token.data() + 5;
  const auto read = std::from_chars(token.data() + 3, end, byte, 16);
  return read.ptr == end && read.ec == std::errc() ? std::optional(static_cast<char>(byte)) : std::nullopt;
}

/// Bytes that make valid UTF-8 are one token, others one U+FFFD each.
void flush_bytes(std::string& bytes, std::vector<std::string>& out) {
  if (bytes.empty()) return;
  if (text::utf8_valid_prefix(bytes) == bytes.size()) {
    out.push_back(std::move(bytes));
  } else {
    out.insert(out.end(), bytes.size(), std::string(text::replacement_character));
  }
  bytes.clear();
}

}  // namespace

TokenDecoder TokenDecoder::parse(const std::optional<JsonNode>& node) {
  TokenDecoder result;
  if (node) {
    result.joins_with_space_ = false;
    result.add(*node, 0);
    result.token_by_token_ = result.works_token_by_token();
  }
  return result;
}

void TokenDecoder::add(const JsonNode& node, int depth) {
  if (depth > max_depth) throw node.error(ErrorCode::unsupported, "sequences are nested too deeply");
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const auto& child : node.at("decoders").items()) add(child, depth + 1);
  } else if (type == "ByteLevel") {
    steps_.emplace_back(ByteLevel{});
  } else if (type == "Metaspace") {
    steps_.emplace_back(parse_metaspace(node));
  } else if (type == "ByteFallback") {
    steps_.emplace_back(ByteFallback{});
  } else if (type == "Fuse") {
    steps_.emplace_back(Fuse{});
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{TextPattern::parse(node.at("pattern")), node.at("content").string()});
  } else if (type == "Strip") {
    const std::string& character = node.at("content").string();
    if (character.empty() || text::utf8_size(character[0]) != character.size()) {
      throw node.at("content").wrong_type("one character");
    }
    steps_.emplace_back(
        Strip{character, node.at("start").integer(0, INT32_MAX), node.at("stop").integer(0, INT32_MAX)});
  } else {
    throw node.unknown_type("decoder", "ByteLevel, Metaspace, ByteFallback, Fuse, Replace, Strip, Sequence");
  }
}

/// Once the tokens are one, only what is at its beginning may still be changed: a step that looks farther has to see
/// the whole text.
bool TokenDecoder::works_token_by_token() const noexcept {
  bool fused = false;
  for (const Step& step : steps_) {
    const auto* strip = std::get_if<Strip>(&step);
    const bool fuses = std::holds_alternative<Fuse>(step);
    if (fused && !fuses && (strip == nullptr || strip->stop > 0)) return false;
    fused = fused || fuses || std::holds_alternative<ByteLevel>(step);
  }
  return true;
}

TokenDecoder::Text TokenDecoder::apply(std::vector<std::string> tokens, bool begins_text) const {
  size_t bytes = 0;
  for (const auto& token : tokens) bytes += token.size();
  Call call{text::WorkBudget(bytes), begins_text};
  for (const Step& step : steps_) {
    call.budget.produce(bytes);
    tokens = std::visit([&](const auto& kind) { return run(kind, std::move(tokens), call); }, step);
  }
  Text result{joins_with_space_ && !begins_text ? " " : ""};
  result.text += join(tokens, joins_with_space_ ? " " : "");
  // A text that is empty has not begun, and one that ends in U+FFFD may lack the rest of a character.
  result.complete = token_by_token_ && !call.ends_in_bytes && !result.text.empty() &&
                    !result.text.ends_with(text::replacement_character);
  return result;
}

TokenDecoder::Tokens TokenDecoder::run(const ByteLevel& /*step*/, const Tokens& tokens, Call& call) {
  std::string bytes;
  for (const auto& token : tokens) append_bytes_of_level(token, bytes);
  call.fused = true;
  return {text::utf8_repaired(bytes)};
}

/// The space that the pre-tokenizer put before the text is not part of it.
TokenDecoder::Tokens TokenDecoder::run(const Metaspace& step, Tokens tokens, Call& call) {
  const TextPattern mark = TextPattern::literal(step.replacement);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool drops = i == 0 && call.begins_text && step.prepend != Metaspace::Prepend::never;
    tokens[i] = mark.replace_all(tokens[i], drops ? "" : " ", call.budget);
  }
  return tokens;
}

TokenDecoder::Tokens TokenDecoder::run(const ByteFallback& /*step*/, Tokens tokens, Call& call) {
  Tokens result;
  std::string bytes;
  for (auto& token : tokens) {
    if (const auto byte = byte_of(token)) {
      bytes += *byte;
    } else {
      flush_bytes(bytes, result);
      result.push_back(std::move(token));
    }
  }
  call.ends_in_bytes = call.ends_in_bytes || !bytes.empty();
  flush_bytes(bytes, result);
  return result;
}

TokenDecoder::Tokens TokenDecoder::run(const Fuse& /*step*/, const Tokens& tokens, Call& call) {
  call.fused = true;
  return {join(tokens, "")};
}

TokenDecoder::Tokens TokenDecoder::run(const Replace& step, Tokens tokens, Call& call) {
  for (auto& token : tokens) token = step.pattern.replace_all(token, step.content, call.budget);
  return tokens;
}

TokenDecoder::Tokens TokenDecoder::run(const Strip& step, Tokens tokens, Call& call) {
  const int64_t start = call.fused && !call.begins_text ? 0 : step.start;
  for (auto& token : tokens) {
    std::string_view left = token;
    for (int64_t i = 0; i < start && left.starts_with(step.character); ++i) {
      left.remove_prefix(step.character.size());
    }
    for (int64_t i = 0; i < step.stop && left.ends_with(step.character); ++i) {
      left.remove_suffix(step.character.size());
    }
    token = std::string(left);
  }
  return tokens;
}

}  // namespace w4q::tokenizer
