#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "core/text.h"
#include "io/files.h"
#include "io/json.h"
#include "text/utf8.h"
#include "text/work_budget.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/json_node.h"
#include "tokenizer/post_processor.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/text_normalizer.h"
#include "tokenizer/token_decoder.h"
#include "tokenizer/unigram.h"

namespace w4q::tokenizer {

namespace {

/// The file, component by component, in the order in which a text passes them.
struct Components {
  TextNormalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::variant<Bpe, Unigram> model;
  AddedTokens added;
  PostProcessor post_processor;
  TokenDecoder decoder;

  const Vocabulary& vocabulary() const noexcept {
    const auto* bpe = std::get_if<Bpe>(&model);
    return bpe != nullptr ? bpe->vocabulary() : std::get_if<Unigram>(&model)->vocabulary();
  }
  int64_t end_id() const noexcept { return std::max(vocabulary().end_id(), added.end_id()); }
};

std::variant<Bpe, Unigram> parse_model(const JsonNode& node) {
  const auto type = node.find("type");
  if (type && type->string() == "Unigram") return Unigram::parse(node);
  if (type && type->string() != "BPE") throw node.unknown_type("model", "BPE, Unigram");
  return Bpe::parse(node);
}

/// One call of encode(): the stages that a text passes.
class Encoding {
 public:
  Encoding(const Components& tokenizer, std::string_view text)
      : tokenizer_(tokenizer), text_(text), budget_(text.size()) {
    if (const auto* bpe = std::get_if<Bpe>(&tokenizer.model)) encoder_.emplace(*bpe, text.size());
  }

  std::vector<int32_t> run() {
    for (const auto& part : tokenizer_.added.split(text_, false, budget_)) {
      if (part.id >= 0) {
        ids_.push_back(part.id);
      } else {
        encode_part(text_.substr(part.range.begin, part.range.size()), part.range.begin == 0);
      }
    }
    return std::move(ids_);
  }

 private:
  void encode_part(std::string_view text, bool begins_text) {
    const std::string normalized = tokenizer_.normalizer.apply(text, budget_);
    for (const auto& part : tokenizer_.added.split(normalized, true, budget_)) {
      if (part.id >= 0) {
        ids_.push_back(part.id);
      } else {
        encode_words(normalized.substr(part.range.begin, part.range.size()), begins_text && part.range.begin == 0);
      }
    }
  }

  void encode_words(std::string part, bool begins_text) {
    const Words words = tokenizer_.pre_tokenizer.apply(std::move(part), begins_text, budget_);
    for (const auto& word : words.words) {
      const auto text = std::string_view(words.text).substr(word.range.begin, word.range.size());
      if (encoder_) {
        encoder_->encode(text, ids_);
      } else {
        std::get<Unigram>(tokenizer_.model).encode(text, ids_);
      }
    }
  }

  const Components& tokenizer_;
  std::string_view text_;
  text::WorkBudget budget_;
  std::optional<BpeEncoder> encoder_;  ///< of BPE
  std::vector<int32_t> ids_;
};

}  // namespace

struct Tokenizer::Impl : Components {
  /// What stands for `id` in the file; null for a special token that is skipped. Throws bad_argument for an unknown id.
  const std::string* token(int32_t id, bool skips_special) const {
    const AddedToken* known = added.find(id);
    const std::string* token = known ? &known->content : vocabulary().token(id);
    if (token == nullptr) {
      throw Error(ErrorCode::bad_argument, concat("token id ", id, " is not in the vocabulary"))
          .detail(concat("ids are below ", end_id()));
    }
    return skips_special && known && known->special ? nullptr : token;
  }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::open(const std::filesystem::path& folder) {
  const auto path = folder / "tokenizer.json";
  return parse(io::read_model_file(path, io::max_tokenizer_bytes), path.native());
}

Tokenizer Tokenizer::parse(std::string_view json, std::string_view source) {
  const io::Json file = io::parse_json(json, source);
  const JsonNode root(file, source);
  auto impl = std::make_unique<Impl>();
  impl->normalizer = TextNormalizer::parse(root.find("normalizer"));
  impl->pre_tokenizer = PreTokenizer::parse(root.find("pre_tokenizer"));
  impl->model = parse_model(root.at("model"));
  impl->added = AddedTokens(root.find("added_tokens"), impl->vocabulary(), impl->normalizer);
  impl->post_processor = PostProcessor::parse(root.find("post_processor"), impl->end_id());
  impl->decoder = TokenDecoder::parse(root.find("decoder"));
  return Tokenizer(std::move(impl));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::string repaired;
  if (text::utf8_valid_prefix(text) != text.size()) text = repaired = text::utf8_repaired(text);
  std::vector<int32_t> ids = Encoding(*impl_, text).run();
  return add_special_tokens ? impl_->post_processor.apply(std::move(ids)) : ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const int32_t id : ids) {
    if (const auto* token = impl_->token(id, skip_special_tokens)) tokens.push_back(*token);
  }
  return impl_->decoder.apply(std::move(tokens)).text;
}

std::string TextStream::add(int32_t id) {
  const std::string* token = tokenizer_.impl_->token(id, true);
  if (token == nullptr) return {};
  held_.push_back(*token);
  const auto [text, complete] = tokenizer_.impl_->decoder.apply(held_, begins_text_);
  if (text.ends_with(text::replacement_character)) return {};
  std::string added = rest(text);
  if (complete) {
    held_.clear();
    begins_text_ = false;
    given_ -= text.size();
  }
  return added;
}

std::string TextStream::finish() {
  return held_.empty() ? std::string() : rest(tokenizer_.impl_->decoder.apply(held_, begins_text_).text);
}

std::string TextStream::rest(const std::string& text) {
  if (text.size() <= given_) return {};
  std::string added = text.substr(given_);
  given_ = text.size();
  return added;
}

int64_t Tokenizer::vocab_size() const noexcept { return impl_->end_id(); }

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto added = impl_->added.id(token);
  return added ? added : impl_->vocabulary().id(token);
}

}  // namespace w4q::tokenizer
