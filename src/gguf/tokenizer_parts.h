// What both directions and both kinds of tokenizer share.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"

namespace w4q::gguf {

/// tokenizer.ggml.token_type.
enum class GgufTokenType : int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

/// One token of a GGUF vocabulary; its id is its place.
struct GgufToken {
  std::string text;
  GgufTokenType type = GgufTokenType::normal;
};

/// How sentence-piece writes a space.
inline constexpr std::string_view piece_space = "▁";

/// Components of tokenizer.json for sentence-piece's way with spaces. With `prefix` every text begins with one.
io::Json piece_normalizer(bool prefix);
io::Json piece_decoder(bool prefix);
io::Json byte_level_component();

/// The merges of a vocabulary whose tokens have scores, as tokenizer.json orders them: for every token, best score
/// first, all pairs of tokens that make it. Tokens that are not `normal` neither merge nor arise.
using PieceMerges = std::vector<std::pair<std::string, std::string>>;
/// `scores` are as many as `tokens`. Throws unsupported when two tokens that arise have one score, or a token is longer
/// than any real one.
PieceMerges merges_of_pieces(std::span<const GgufToken> tokens, std::span<const float> scores, std::string_view source);

/// Scores that make the same merges: higher for a token that arises earlier. Throws unsupported when no scores do.
std::vector<float> scores_of_merges(std::span<const GgufToken> tokens, const PieceMerges& merges,
                                    std::string_view source);

}  // namespace w4q::gguf
