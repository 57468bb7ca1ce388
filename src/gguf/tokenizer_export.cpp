// tokenizer.json and tokenizer_config.json become the "tokenizer.*" metadata of a GGUF file.
#include <algorithm>
#include <array>

#include "core/text.h"
#include "gguf/pre_tokenizers.h"
#include "gguf/tokenizer.h"
#include "gguf/tokenizer_parts.h"
#include "tokenizer/json_node.h"
#include "tokenizer/vocabulary.h"

namespace w4q::gguf {
namespace {

using io::Json;

constexpr std::string_view source = "tokenizer.json";
constexpr std::string_view reason = "GGUF metadata cannot say it";
constexpr int deepest_sequence = 20;

Error cannot(const tokenizer::JsonNode& node, std::string_view what) {
  return node.error(ErrorCode::unsupported, what).detail(reason).hint("--no-tokenizer converts the weights alone");
}

Json component(const Json& tokenizer, std::string_view name) {
  const auto found = tokenizer.find(name);
  return found == tokenizer.end() ? Json(nullptr) : *found;
}

/// What the post-processor puts around a text: at most one token on each side.
struct Frame {
  std::optional<int64_t> before, after;
};

void read_template(const tokenizer::JsonNode& node, Frame& frame) {
  bool text_seen = false;
  for (const auto& piece : node.at("single").items()) {
    if (piece.find("Sequence")) {
      if (text_seen) throw cannot(piece, "the template repeats the text");
      text_seen = true;
      continue;
    }
    const std::string& name = piece.at("SpecialToken").at("id").string();
    const auto ids = node.at("special_tokens").at(name).at("ids").items();
    auto& side = text_seen ? frame.after : frame.before;
    if (ids.size() != 1 || side) throw cannot(piece, "more than one token in front of the text or behind it");
    side = ids[0].integer(0, tokenizer::max_token_id);
  }
}

void read_frame(const tokenizer::JsonNode& node, Frame& frame, int depth = 0) {
  const std::string& type = node.type();
  if (type == "TemplateProcessing") return read_template(node, frame);
  if (type == "ByteLevel") return;
  if (type != "Sequence" || depth > deepest_sequence) throw cannot(node, concat("post-processor ", printable(type)));
  for (const auto& child : node.at("processors").items()) read_frame(child, frame, depth + 1);
}

bool is_byte_token(std::string_view text) {
  return text.size() == 6 && text.starts_with("<0x") && text.ends_with('>') &&
         text.substr(3, 2).find_first_not_of("0123456789ABCDEF") == std::string_view::npos;
}

/// An option that changes what the token matches.
void refuse_options(const tokenizer::JsonNode& token, bool normalizes) {
  for (const std::string_view option : {"single_word", "lstrip", "rstrip"}) {
    if (token.boolean_or(option, false)) throw cannot(token, concat("an added token with ", option));
  }
  if (normalizes && token.boolean_or("normalized", true)) throw cannot(token, "an added token that is normalized");
}

/// As many as the embedding table has rows; ids without a token get an unused one, as converters do.
std::vector<GgufToken> read_tokens(const tokenizer::JsonNode& root, int64_t count, bool pieces) {
  const tokenizer::JsonNode model = root.at("model");
  const auto vocabulary = tokenizer::Vocabulary::parse(model.at("vocab"));
  std::vector<GgufToken> tokens;
  for (int64_t id = 0; id < count; ++id) tokens.push_back({concat("[PAD", id, "]"), GgufTokenType::unused});
  const auto put = [&](int64_t id, const std::string& text, GgufTokenType type) {
    if (id < count) {
      tokens[static_cast<size_t>(id)] = {text, type};
      return;
    }
    throw root.error(ErrorCode::mismatch, concat("the token \"", printable(text), "\" has id ", id))
        .detail(concat("the embedding table has ", count, " rows"));
  };
  for (int64_t id = 0; id < vocabulary.end_id(); ++id) {
    const std::string* text = vocabulary.token(id);
    if (text == nullptr) continue;
    put(id, *text, pieces && is_byte_token(*text) ? GgufTokenType::byte : GgufTokenType::normal);
  }
  const auto added = root.find("added_tokens");
  const bool normalizes = root.find("normalizer").has_value();
  for (const auto& token : added ? added->items() : std::vector<tokenizer::JsonNode>()) {
    refuse_options(token, normalizes);
    const bool special = token.boolean_or("special", false);
    put(token.at("id").integer(0, tokenizer::max_token_id), token.at("content").string(),
        special ? GgufTokenType::control : GgufTokenType::user_defined);
  }
  return tokens;
}

PieceMerges read_merges(const tokenizer::JsonNode& model) {
  PieceMerges merges;
  for (const auto& merge : model.at("merges").items()) {
    if (merge.value().is_array()) {
      const auto parts = merge.items();
      if (parts.size() != 2) throw merge.wrong_type("two tokens");
      merges.emplace_back(parts[0].string(), parts[1].string());
      continue;
    }
    const std::string& text = merge.string();
    if (text.starts_with("#version")) continue;
    const size_t space = text.find(' ');
    if (space == std::string::npos) throw merge.wrong_type("two tokens");
    merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  return merges;
}

void refuse_model_options(const tokenizer::JsonNode& model, bool pieces, bool ignore_merges) {
  const auto type = model.find("type");
  if (type && type->string() != "BPE") throw cannot(model, concat("a model of type ", printable(type->string())));
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto mark = model.find(key);
    if (mark && !mark->string().empty()) throw cannot(*mark, "subword marks");
  }
  if (model.boolean_or("byte_fallback", false) != pieces)
    throw cannot(model, concat("byte_fallback is ", pieces ? "false" : "true"));
  if (model.boolean_or("ignore_merges", false) != ignore_merges) {
    throw cannot(model,
                 concat("ignore_merges is ", ignore_merges ? "false" : "true", " with this way of cutting text"));
  }
}

/// One property of all tokens as an array of the metadata.
template <class T, class Select>
io::GgufValue column(const std::vector<GgufToken>& tokens, const Select& select) {
  std::vector<T> values;
  values.reserve(tokens.size());
  for (const auto& token : tokens) values.push_back(select(token));
  return io::GgufArray(std::move(values));
}

void add_byte_level(const tokenizer::JsonNode& root, io::GgufMetadata& metadata) {
  const Json& file = root.value();
  const auto* row = match_gguf_pre_tokenizer(component(file, "normalizer"), component(file, "pre_tokenizer"));
  if (row == nullptr) {
    throw cannot(root, "normalizer and pre_tokenizer cut the text in a way that has no name there")
        .detail(concat("known: ", gguf_pre_tokenizer_names()));
  }
  const tokenizer::JsonNode model = root.at("model");
  refuse_model_options(model, false, row->ignore_merges);
  if (model.find("unk_token")) throw cannot(model, "an unknown token beside byte-level tokens");
  std::vector<std::string> merges;
  for (const auto& [left, right] : read_merges(model)) {
    if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos) {
      throw cannot(model, concat("a merge with a space: \"", printable(left), "\" and \"", printable(right), "\""));
    }
    merges.push_back(concat(left, " ", right));
  }
  metadata.push_back({"tokenizer.ggml.pre", std::string(row->name)});
  metadata.push_back({"tokenizer.ggml.merges", io::GgufArray(std::move(merges))});
}

/// Whether every text begins with a space; nothing for another way to write spaces.
std::optional<bool> space_prefix(const Json& file, std::vector<std::string>& notes) {
  const Json normalizer = component(file, "normalizer"), pre_tokenizer = component(file, "pre_tokenizer");
  if (pre_tokenizer.is_null()) {
    for (const bool prefix : {true, false}) {
      if (same_component(normalizer, piece_normalizer(prefix))) return prefix;
    }
    return std::nullopt;
  }
  for (const std::string_view scheme : {"first", "always", "never"}) {
    const Json metaspace = {
        {"type", "Metaspace"}, {"replacement", piece_space}, {"prepend_scheme", scheme}, {"split", false}};
    if (!normalizer.is_null() || !same_component(pre_tokenizer, metaspace)) continue;
    if (scheme == "first") {
      notes.emplace_back("the space in front of a text is put behind control tokens too by most readers of GGUF");
    }
    return scheme != "never";
  }
  return std::nullopt;
}

void add_pieces(const tokenizer::JsonNode& root, std::vector<GgufToken>& tokens, io::GgufMetadata& metadata,
                std::vector<std::string>& notes) {
  const auto prefix = space_prefix(root.value(), notes);
  if (!prefix) throw cannot(root, "normalizer and pre_tokenizer write spaces in another way than sentence-piece");
  const Json decoder = component(root.value(), "decoder");
  if (!same_component(decoder, piece_decoder(*prefix))) throw cannot(root, "the decoder is not sentence-piece's");
  const tokenizer::JsonNode model = root.at("model");
  refuse_model_options(model, true, false);
  if (std::ranges::count(tokens, GgufTokenType::byte, &GgufToken::type) != 256) {
    throw cannot(model, "the vocabulary lacks a token for some byte");
  }
  const std::string unknown = model.at("unk_token").string();
  const auto place = std::ranges::find(tokens, unknown, &GgufToken::text);
  if (place == tokens.end()) throw cannot(model, "unk_token is no token");
  place->type = GgufTokenType::unknown;
  auto scores = scores_of_merges(tokens, read_merges(model), source);
  metadata.push_back({"tokenizer.ggml.pre", std::string("default")});
  metadata.push_back({"tokenizer.ggml.scores", io::GgufArray(std::move(scores))});
  metadata.push_back({"tokenizer.ggml.unknown_token_id", static_cast<uint32_t>(place - tokens.begin())});
  metadata.push_back({"tokenizer.ggml.add_space_prefix", *prefix});
}

/// The id of a token that tokenizer_config.json names, as a string or as an object with "content".
std::optional<int64_t> named_token(const Json& config, std::string_view name, const std::vector<GgufToken>& tokens) {
  const auto value = config.find(name);
  if (value == config.end()) return std::nullopt;
  const Json* text = &*value;
  if (text->is_object() && text->contains("content")) text = &(*text)["content"];
  if (!text->is_string()) return std::nullopt;
  const auto place = std::ranges::find(tokens, text->get_ref<const std::string&>(), &GgufToken::text);
  return place == tokens.end() ? std::nullopt : std::optional<int64_t>(place - tokens.begin());
}

/// The tokens that end a text: one that tokenizer_config.json or the template names first, then those of the config.
std::vector<int64_t> end_tokens(std::optional<int64_t> first, const model::ModelConfig& config) {
  std::vector<int64_t> ids;
  if (first) ids.push_back(*first);
  for (const int64_t id : config.eos_tokens) {
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

void add_id(std::string_view key, std::optional<int64_t> id, const model::ModelConfig& config,
            io::GgufMetadata& metadata) {
  const bool exists = id && *id >= 0 && *id < config.vocab_size;
  if (exists) metadata.push_back({concat("tokenizer.ggml.", key), static_cast<uint32_t>(*id)});
}

constexpr std::array<std::string_view, 3> end_keys = {"eos_token_id", "eot_token_id", "eom_token_id"};

void add_end_tokens(const std::vector<int64_t>& ends, const model::ModelConfig& config, io::GgufMetadata& metadata) {
  for (size_t i = 0; i < std::min(ends.size(), end_keys.size()); ++i) add_id(end_keys[i], ends[i], config, metadata);
}

void add_special_tokens(const tokenizer::JsonNode& root, const Json& tokenizer_config, const model::ModelConfig& config,
                        const std::vector<GgufToken>& tokens, io::GgufMetadata& metadata,
                        std::vector<std::string>& notes) {
  Frame frame;
  if (const auto processor = root.find("post_processor")) read_frame(*processor, frame);
  auto bos = frame.before;
  if (!bos) bos = named_token(tokenizer_config, "bos_token", tokens);
  if (!bos) bos = config.bos_token;
  const auto first_end = frame.after ? frame.after : named_token(tokenizer_config, "eos_token", tokens);
  const auto ends = end_tokens(first_end, config);
  add_id("bos_token_id", bos, config, metadata);
  add_end_tokens(ends, config, metadata);
  if (ends.size() > end_keys.size()) {
    notes.push_back(concat(ends.size(), " tokens end a text; three of them can be stated"));
  }
  add_id("padding_token_id", named_token(tokenizer_config, "pad_token", tokens), config, metadata);
  metadata.push_back({"tokenizer.ggml.add_bos_token", frame.before.has_value()});
  metadata.push_back({"tokenizer.ggml.add_eos_token", frame.after.has_value()});
}

}  // namespace

io::GgufMetadata token_ids_to_gguf(const model::ModelConfig& config) {
  io::GgufMetadata metadata = {{"tokenizer.ggml.model", std::string(no_vocabulary)}};
  add_id("bos_token_id", config.bos_token, config, metadata);
  add_end_tokens(config.eos_tokens, config, metadata);
  return metadata;
}

io::GgufMetadata tokenizer_to_gguf(const TokenizerFiles& files, const model::ModelConfig& config,
                                   std::vector<std::string>& notes) {
  const tokenizer::JsonNode root(files.tokenizer, source);
  const auto decoder = root.find("decoder");
  const bool pieces = !decoder || decoder->type() != "ByteLevel";
  auto tokens = read_tokens(root, config.vocab_size, pieces);
  io::GgufMetadata metadata = {{"tokenizer.ggml.model", std::string(pieces ? "llama" : "gpt2")}};
  if (pieces) {
    add_pieces(root, tokens, metadata, notes);
  } else {
    add_byte_level(root, metadata);
  }
  metadata.push_back(
      {"tokenizer.ggml.tokens", column<std::string>(tokens, [](const GgufToken& token) { return token.text; })});
  metadata.push_back({"tokenizer.ggml.token_type", column<int32_t>(tokens, [](const GgufToken& token) {
                        return static_cast<int32_t>(token.type);
                      })});
  add_special_tokens(root, files.tokenizer_config, config, tokens, metadata, notes);
  const auto chat_template = files.tokenizer_config.find("chat_template");
  if (chat_template != files.tokenizer_config.end() && chat_template->is_string()) {
    metadata.push_back({"tokenizer.chat_template", chat_template->get<std::string>()});
  } else if (chat_template != files.tokenizer_config.end() && !chat_template->is_null()) {
    notes.emplace_back("tokenizer_config.json has several chat templates: none is stated");
  }
  return metadata;
}

}  // namespace w4q::gguf
