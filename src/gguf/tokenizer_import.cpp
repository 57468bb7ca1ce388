// The tokenizer of a GGUF file becomes tokenizer.json and tokenizer_config.json.
#include <algorithm>
#include <unordered_set>

#include "core/text.h"
#include "gguf/pre_tokenizers.h"
#include "gguf/tokenizer.h"
#include "gguf/tokenizer_parts.h"
#include "text/utf8.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocabulary.h"

namespace w4q::gguf {
namespace {

using io::Json;

constexpr std::string_view tokens_key = "tokenizer.ggml.tokens", types_key = "tokenizer.ggml.token_type";
constexpr std::string_view scores_key = "tokenizer.ggml.scores", merges_key = "tokenizer.ggml.merges";

std::vector<GgufToken> read_tokens(const GgufKeys& keys) {
  const auto* texts = keys.texts(tokens_key);
  const auto* types = keys.integers(types_key);
  if (texts == nullptr || texts->empty()) throw keys.error(ErrorCode::bad_file, tokens_key, "is missing");
  if (types == nullptr) {
    throw keys.error(ErrorCode::unsupported, types_key, "is missing: nothing says which tokens are control tokens");
  }
  if (types->size() != texts->size() || texts->size() > static_cast<size_t>(tokenizer::max_token_id)) {
    throw keys.error(ErrorCode::bad_file, types_key, concat(types->size(), " types of ", texts->size(), " tokens"));
  }
  std::vector<GgufToken> tokens(texts->size());
  std::unordered_set<std::string_view> seen;
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string& text = (*texts)[id];
    const int32_t type = (*types)[id];
    const auto refuse = [&](std::string_view what) {
      return keys.error(ErrorCode::bad_file, tokens_key, concat("token ", id, " ", what));
    };
    if (text::utf8_valid_prefix(text) != text.size()) throw refuse("is not UTF-8");
    if (!seen.insert(text).second) throw refuse(concat("\"", printable(text), "\" is there twice"));
    if (type < 0 || type > 6) throw refuse(concat("has type ", type));
    tokens[id] = {text, type == 0 ? GgufTokenType::normal : static_cast<GgufTokenType>(type)};
  }
  // Converters fill the vocabulary up to the size of the embedding table.
  while (!tokens.empty() && tokens.back().type == GgufTokenType::unused) tokens.pop_back();
  return tokens;
}

/// Control and user-defined tokens are cut out of the text before anything else.
bool is_added(GgufTokenType type) {
  return type == GgufTokenType::control || type == GgufTokenType::user_defined || type == GgufTokenType::unknown;
}

/// Added tokens at the end of the vocabulary stand only in "added_tokens". Those before it stand in the vocabulary too:
/// readers of tokenizer.json number what it lacks from its end on.
size_t vocabulary_end(const std::vector<GgufToken>& tokens) {
  size_t end = tokens.size();
  while (end > 0 && is_added(tokens[end - 1].type)) --end;
  return end;
}

/// Texts are unique, which the checked insertion of a JSON object would test again in quadratic time.
Json vocabulary_of(const std::vector<GgufToken>& tokens, size_t end) {
  Json vocabulary = Json::object();
  auto& entries = vocabulary.get_ref<Json::object_t&>();
  for (size_t id = 0; id < end; ++id) entries.emplace_back(tokens[id].text, id);
  return vocabulary;
}

Json added_tokens_of(const std::vector<GgufToken>& tokens) {
  Json added = Json::array();
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!is_added(tokens[id].type)) continue;
    added.push_back({{"id", id},
                     {"content", tokens[id].text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", tokens[id].type != GgufTokenType::user_defined}});
  }
  return added;
}

/// The text of the token whose id `key` states; nothing when it states none.
std::optional<std::string> special_token(const GgufKeys& keys, const std::vector<GgufToken>& tokens,
                                         std::string_view key, std::optional<int64_t> fallback = std::nullopt) {
  auto id = keys.integer(key);
  if (!id) id = fallback;
  if (!id) return std::nullopt;
  if (*id < 0 || *id >= static_cast<int64_t>(tokens.size())) {
    throw keys.error(ErrorCode::bad_file, key, concat("is ", *id))
        .detail(concat("there are ", tokens.size(), " tokens"));
  }
  return tokens[static_cast<size_t>(*id)].text;
}

/// What is put around every text. Null for nothing.
Json frame(const std::vector<GgufToken>& tokens, const std::optional<std::string>& before,
           const std::optional<std::string>& after) {
  if (!before && !after) return nullptr;
  Json single = Json::array(), pair = Json::array(), special = Json::object();
  const auto add = [&](Json& list, const std::optional<std::string>& token, int type) {
    if (!token) return;
    list.push_back({{"SpecialToken", {{"id", *token}, {"type_id", type}}}});
    const auto id = std::ranges::find(tokens, *token, &GgufToken::text) - tokens.begin();
    special[*token] = {{"id", *token}, {"ids", {id}}, {"tokens", {*token}}};
  };
  const auto add_text = [&](Json& list, std::string_view name, int type) {
    add(list, before, type);
    list.push_back({{"Sequence", {{"id", name}, {"type_id", type}}}});
    add(list, after, type);
  };
  add_text(single, "A", 0);
  add_text(pair, "A", 0);
  add_text(pair, "B", 1);
  return {{"type", "TemplateProcessing"},
          {"single", std::move(single)},
          {"pair", std::move(pair)},
          {"special_tokens", std::move(special)}};
}

struct SpecialTokens {
  std::optional<std::string> bos, eos, unknown, padding;
};

/// The frame that add_bos_token and add_eos_token ask for.
Json wanted_frame(const GgufKeys& keys, const std::vector<GgufToken>& tokens, const SpecialTokens& special,
                  bool adds_bos) {
  const bool bos = keys.boolean("tokenizer.ggml.add_bos_token").value_or(adds_bos);
  const bool eos = keys.boolean("tokenizer.ggml.add_eos_token").value_or(false);
  if (bos && !special.bos) throw keys.error(ErrorCode::bad_file, "tokenizer.ggml.bos_token_id", "is missing");
  if (eos && !special.eos) throw keys.error(ErrorCode::bad_file, "tokenizer.ggml.eos_token_id", "is missing");
  return frame(tokens, bos ? special.bos : std::nullopt, eos ? special.eos : std::nullopt);
}

Json bpe_model(const std::optional<std::string>& unknown, bool pieces, bool ignore_merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unknown ? Json(*unknown) : Json(nullptr)},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", pieces},
          {"byte_fallback", pieces},
          {"ignore_merges", ignore_merges}};
}

/// "a b" → ["a", "b"].
Json pair_of_merge(const GgufKeys& keys, const std::string& merge) {
  const size_t space = merge.find(' ');
  if (space == 0 || space == std::string::npos || space + 1 == merge.size() ||
      merge.find(' ', space + 1) != std::string::npos || text::utf8_valid_prefix(merge) != merge.size()) {
    throw keys.error(ErrorCode::bad_file, merges_key, concat("\"", printable(merge), "\" is not two tokens"));
  }
  return Json::array({merge.substr(0, space), merge.substr(space + 1)});
}

Json byte_level_tokenizer(const GgufKeys& keys, const std::vector<GgufToken>& tokens, const SpecialTokens& special) {
  const std::string name = keys.text("tokenizer.ggml.pre").value_or("default");
  const auto* row = find_gguf_pre_tokenizer(name);
  if (row == nullptr) {
    throw keys
        .error(ErrorCode::unsupported, "tokenizer.ggml.pre",
               concat("\"", printable(name), "\": how this model cuts text into words is not known"))
        .detail(concat("supported: ", gguf_pre_tokenizer_names()))
        .hint("--no-tokenizer converts the weights alone");
  }
  const auto* merges = keys.texts(merges_key);
  if (merges == nullptr) throw keys.error(ErrorCode::bad_file, merges_key, "is missing");
  Json model = bpe_model(std::nullopt, false, row->ignore_merges);
  model["vocab"] = vocabulary_of(tokens, vocabulary_end(tokens));
  Json pairs = Json::array();
  for (const auto& merge : *merges) pairs.push_back(pair_of_merge(keys, merge));
  model["merges"] = std::move(pairs);

  Json post_processor = byte_level_component();
  post_processor["trim_offsets"] = false;
  if (Json around = wanted_frame(keys, tokens, special, row->adds_bos); !around.is_null()) {
    post_processor = {{"type", "Sequence"},
                      {"processors", Json::array({std::move(post_processor), std::move(around)})}};
  }
  return {{"normalizer", row->normalizer},
          {"pre_tokenizer", row->pre_tokenizer},
          {"post_processor", std::move(post_processor)},
          {"decoder", byte_level_component()},
          {"model", std::move(model)}};
}

Json piece_tokenizer(const GgufKeys& keys, const std::vector<GgufToken>& tokens, const SpecialTokens& special) {
  const auto* scores = keys.numbers(scores_key);
  if (scores == nullptr || scores->size() < tokens.size()) {
    throw keys.error(ErrorCode::bad_file, scores_key,
                     scores == nullptr ? "is missing" : "has fewer scores than tokens");
  }
  if (keys.boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false)) {
    throw keys.error(ErrorCode::unsupported, "tokenizer.ggml.remove_extra_whitespaces", "is true");
  }
  const auto bytes = std::ranges::count(tokens, GgufTokenType::byte, &GgufToken::type);
  if (bytes != 256) throw keys.error(ErrorCode::unsupported, types_key, concat(bytes, " tokens of bytes, not 256"));
  const bool prefix = keys.boolean("tokenizer.ggml.add_space_prefix").value_or(true);
  Json model = bpe_model(special.unknown, true, false);
  model["vocab"] = vocabulary_of(tokens, tokens.size());
  Json pairs = Json::array();
  for (const auto& [left, right] : merges_of_pieces(tokens, *scores, keys.source())) {
    pairs.push_back(Json::array({left, right}));
  }
  model["merges"] = std::move(pairs);
  return {{"normalizer", piece_normalizer(prefix)},
          {"pre_tokenizer", nullptr},
          {"post_processor", wanted_frame(keys, tokens, special, true)},
          {"decoder", piece_decoder(prefix)},
          {"model", std::move(model)}};
}

Json tokenizer_config_of(const GgufKeys& keys, const SpecialTokens& special) {
  Json config = {{"clean_up_tokenization_spaces", false},
                 {"model_max_length", keys.size("%.context_length", 2048)},
                 {"tokenizer_class", "PreTrainedTokenizerFast"}};
  const auto add = [&](std::string_view name, const std::optional<std::string>& token) {
    if (token) config[std::string(name)] = *token;
  };
  add("bos_token", special.bos);
  add("eos_token", special.eos);
  add("unk_token", special.unknown);
  add("pad_token", special.padding);
  const auto chat_template = keys.text("tokenizer.chat_template");
  if (chat_template && text::utf8_valid_prefix(*chat_template) != chat_template->size()) {
    throw keys.error(ErrorCode::bad_file, "tokenizer.chat_template", "is not UTF-8");
  }
  add("chat_template", chat_template);
  return config;
}

}  // namespace

TokenizerFiles tokenizer_from_gguf(const GgufKeys& keys) {
  const std::string kind = keys.text("tokenizer.ggml.model").value_or("");
  const bool pieces = kind == "llama";
  if (!pieces && kind != "gpt2") {
    throw keys.error(ErrorCode::unsupported, "tokenizer.ggml.model", concat("\"", printable(kind), "\""))
        .detail("supported: gpt2 (byte-level BPE), llama (sentence-piece BPE)")
        .hint("--no-tokenizer converts the weights alone");
  }
  const auto tokens = read_tokens(keys);
  const auto usual = [&](int64_t id) { return pieces ? std::optional(id) : std::nullopt; };  // of sentence-piece
  const SpecialTokens special = {special_token(keys, tokens, "tokenizer.ggml.bos_token_id", usual(1)),
                                 special_token(keys, tokens, "tokenizer.ggml.eos_token_id", usual(2)),
                                 special_token(keys, tokens, "tokenizer.ggml.unknown_token_id", usual(0)),
                                 special_token(keys, tokens, "tokenizer.ggml.padding_token_id")};
  const Json parts = pieces ? piece_tokenizer(keys, tokens, special) : byte_level_tokenizer(keys, tokens, special);
  Json tokenizer = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  tokenizer["added_tokens"] = added_tokens_of(tokens);
  tokenizer.update(parts);
  // Whatever the parts contradict is found by whoever reads them.
  tokenizer::Tokenizer::parse(tokenizer.dump(), concat(keys.source(), ": tokenizer"));
  return {std::move(tokenizer), tokenizer_config_of(keys, special)};
}

}  // namespace w4q::gguf
