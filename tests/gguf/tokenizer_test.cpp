// Tokenizers between GGUF metadata and tokenizer.json: what comes back must encode every text of the reference cases in
// the same way.
#include "gguf/tokenizer.h"

#include <algorithm>
#include <map>

#include "gguf/pre_tokenizers.h"
#include "gguf/tokenizer_parts.h"
#include "support.h"
#include "text/utf8.h"
#include "tokenizer/tokenizer.h"

namespace w4q::gguf {
namespace {

using io::Json;
using test::expect_error;

constexpr int64_t vocab_size = 1024;

model::ModelConfig config_with(std::vector<int64_t> eos = {}) {
  model::ModelConfig config;
  config.vocab_size = vocab_size;
  config.eos_tokens = std::move(eos);
  return config;
}

Json tokenizer_file(const std::string& name) {
  return io::read_json(test::testdata() / "tokenizers" / (name + ".json"));
}

io::GgufMetadata metadata_of(const Json& tokenizer, const Json& tokenizer_config = Json::object()) {
  std::vector<std::string> notes;
  return tokenizer_to_gguf({tokenizer, tokenizer_config}, config_with(), notes);
}

Json back_from(const io::GgufMetadata& metadata) { return tokenizer_from_gguf(GgufKeys(metadata, "m.gguf")).tokenizer; }

io::GgufValue& at(io::GgufMetadata& metadata, std::string_view key) {
  return std::ranges::find(metadata, key, &io::GgufEntry::key)->value;
}

void without(io::GgufMetadata& metadata, std::string_view key) {
  std::erase_if(metadata, [&](const auto& entry) { return entry.key == key; });
}

TEST(GgufTokenizer, ByteLevelTokenizersEncodeEveryCaseAsBefore) {
  for (const std::string name : {"llama3", "qwen2"}) {
    SCOPED_TRACE(name);
    const auto expected = io::read_json(test::testdata() / "tokenizers" / (name + ".expected.json"));
    const auto tokenizer = tokenizer::Tokenizer::parse(back_from(metadata_of(tokenizer_file(name))).dump(), name);
    EXPECT_GT(expected["cases"].size(), 50u);
    for (const auto& test : expected["cases"]) {
      const std::string text = test["text"];
      EXPECT_EQ(tokenizer.encode(text, false), test["ids"].get<std::vector<int32_t>>()) << text;
      EXPECT_EQ(tokenizer.encode(text, true), test["ids_with_special"].get<std::vector<int32_t>>()) << text;
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, true), false), test["decoded"].get<std::string>()) << text;
    }
  }
}

TEST(GgufTokenizer, TheBundledTokenizerComesBackButForOffsets) {
  const auto folder = test::testdata() / "w4q-llama-tiny";
  const TokenizerFiles files{io::read_json(folder / "tokenizer.json"), io::read_json(folder / "tokenizer_config.json")};
  std::vector<std::string> notes;
  auto metadata = tokenizer_to_gguf(files, config_with({1023}), notes);
  EXPECT_TRUE(notes.empty());
  EXPECT_EQ(at(metadata, "tokenizer.ggml.pre"), io::GgufValue(std::string("llama-bpe")));
  EXPECT_EQ(at(metadata, "tokenizer.ggml.eos_token_id"), io::GgufValue(uint32_t{1023}));
  EXPECT_EQ(at(metadata, "tokenizer.ggml.add_bos_token"), io::GgufValue(true));
  const auto back = tokenizer_from_gguf(GgufKeys(metadata, "m.gguf"));
  for (const char* part : {"added_tokens", "normalizer", "pre_tokenizer", "decoder", "model"}) {
    EXPECT_EQ(back.tokenizer[part], files.tokenizer[part]) << part;
  }
  EXPECT_EQ(back.tokenizer["post_processor"]["processors"][1]["single"],
            files.tokenizer["post_processor"]["processors"][1]["single"]);
  EXPECT_EQ(back.tokenizer_config["bos_token"], files.tokenizer_config["bos_token"]);
  EXPECT_EQ(back.tokenizer_config["eos_token"], files.tokenizer_config["eos_token"]);
}

TEST(GgufTokenizer, TheTableOfWaysToCutTextIsUnambiguousAndParses) {
  for (const char* name : {"llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken", "gpt-2", "smollm"}) {
    const auto* row = find_gguf_pre_tokenizer(name);
    ASSERT_NE(row, nullptr) << name;
    EXPECT_EQ(match_gguf_pre_tokenizer(row->normalizer, row->pre_tokenizer), row);
    auto metadata = metadata_of(tokenizer_file("qwen2"));
    at(metadata, "tokenizer.ggml.pre") = std::string(name);
    without(metadata, "tokenizer.ggml.add_bos_token");
    metadata.push_back({"tokenizer.ggml.bos_token_id", uint32_t{700}});
    EXPECT_EQ(tokenizer::Tokenizer::parse(back_from(metadata).dump(), name).encode("a", true).front() == 700,
              row->adds_bos);
  }
  EXPECT_EQ(find_gguf_pre_tokenizer("llama3"), find_gguf_pre_tokenizer("llama-bpe"));
  EXPECT_EQ(find_gguf_pre_tokenizer("default"), nullptr);
}

TEST(GgufTokenizer, SaysWhyATokenizerCannotBeWritten) {
  const auto refuse = [](std::string_view part, const Json& tokenizer) {
    expect_error(ErrorCode::unsupported, {"tokenizer.json", part, "--no-tokenizer"}, [&] { metadata_of(tokenizer); });
  };
  const auto changed = [](const std::string& name, auto change) {
    Json tokenizer = tokenizer_file(name);
    change(tokenizer);
    return tokenizer;
  };
  refuse("added token that is normalized",
         changed("qwen2", [](Json& t) { t["added_tokens"][0]["normalized"] = true; }));
  refuse("an added token with single_word", tokenizer_file("gpt2"));
  refuse("cut the text in a way", changed("gpt2", [](Json& t) { t["added_tokens"] = Json::array(); }));
  refuse("cut the text in a way", changed("qwen2", [](Json& t) { t["normalizer"] = {{"type", "NFKC"}}; }));
  refuse("ignore_merges is false", changed("llama3", [](Json& t) { t["model"]["ignore_merges"] = false; }));
  refuse("an unknown token", changed("llama3", [](Json& t) { t["model"]["unk_token"] = "!"; }));
  refuse("byte_fallback is true", changed("llama3", [](Json& t) { t["model"]["byte_fallback"] = true; }));
  refuse("post-processor BertProcessing", changed("llama3", [](Json& t) {
           t["post_processor"] = {{"type", "BertProcessing"}};
         }));
  refuse("another way than sentence-piece", changed("mixed", [](Json& t) { t["added_tokens"] = Json::array(); }));
  expect_error(ErrorCode::unsupported, {"merges that scores cannot express"},
               [&] { metadata_of(tokenizer_file("llama2")); });
  expect_error(ErrorCode::mismatch, {"has id 5000", "1024 rows"},
               [&] { metadata_of(changed("llama3", [](Json& t) { t["added_tokens"][0]["id"] = 5000; })); });
}

TEST(GgufTokenizer, NamesWhatIsWrongInTheMetadata) {
  const auto refuse = [](ErrorCode code, std::initializer_list<std::string_view> parts, auto change) {
    auto metadata = metadata_of(tokenizer_file("llama3"));
    change(metadata);
    expect_error(code, parts, [&] { back_from(metadata); });
  };
  const auto tokens = [](io::GgufMetadata& metadata) -> std::vector<std::string>& {
    return std::get<std::vector<std::string>>(std::get<io::GgufArray>(at(metadata, "tokenizer.ggml.tokens")));
  };
  refuse(ErrorCode::unsupported, {"tokenizer.ggml.model", "bert", "--no-tokenizer"},
         [](auto& m) { at(m, "tokenizer.ggml.model") = std::string("bert"); });
  refuse(ErrorCode::unsupported, {"tokenizer.ggml.pre", "falcon", "supported: llama-bpe"},
         [](auto& m) { at(m, "tokenizer.ggml.pre") = std::string("falcon"); });
  refuse(ErrorCode::unsupported, {"token_type", "missing"}, [](auto& m) { without(m, "tokenizer.ggml.token_type"); });
  refuse(ErrorCode::bad_file, {"tokenizer.ggml.merges", "missing"},
         [](auto& m) { without(m, "tokenizer.ggml.merges"); });
  refuse(ErrorCode::bad_file, {"types of"}, [&](auto& m) { tokens(m).pop_back(); });
  refuse(ErrorCode::bad_file, {"token 7 is not UTF-8"}, [&](auto& m) { tokens(m)[7] = "\xFF"; });
  refuse(ErrorCode::bad_file, {"token 7", "is there twice"}, [&](auto& m) { tokens(m)[7] = tokens(m)[3]; });
  refuse(ErrorCode::bad_file, {"bos_token_id", "is 1000000"},
         [](auto& m) { at(m, "tokenizer.ggml.bos_token_id") = uint32_t{1000000}; });
  refuse(ErrorCode::bad_file, {"bos_token_id", "missing"}, [](auto& m) { without(m, "tokenizer.ggml.bos_token_id"); });
  for (const char* merge : {"ab", " b", "a ", "a b c", "a \xFF"}) {
    refuse(ErrorCode::bad_file, {"is not two tokens"}, [&](auto& m) {
      std::get<std::vector<std::string>>(std::get<io::GgufArray>(at(m, "tokenizer.ggml.merges")))[0] = merge;
    });
  }
  refuse(ErrorCode::bad_file, {"needs a token that the vocabulary lacks"}, [&](auto& m) {
    std::get<std::vector<std::string>>(std::get<io::GgufArray>(at(m, "tokenizer.ggml.merges")))[0] = "zzz qqq";
  });
}

TEST(GgufTokenizer, SeveralEndTokensAndTheChatTemplateTravel) {
  const Json tokenizer_config = {{"eos_token", {{"content", "<|eot|>"}}}, {"chat_template", "{{ messages }}"}};
  std::vector<std::string> notes;
  auto metadata = tokenizer_to_gguf({tokenizer_file("llama3"), tokenizer_config}, config_with({701, 702}), notes);
  EXPECT_EQ(at(metadata, "tokenizer.ggml.eos_token_id"), io::GgufValue(uint32_t{702}));
  EXPECT_EQ(at(metadata, "tokenizer.ggml.eot_token_id"), io::GgufValue(uint32_t{701}));
  const auto back = tokenizer_from_gguf(GgufKeys(metadata, "m.gguf"));
  EXPECT_EQ(back.tokenizer_config["chat_template"], "{{ messages }}");
  EXPECT_EQ(back.tokenizer_config["eos_token"], "<|eot|>");
  tokenizer_to_gguf({tokenizer_file("llama3"), tokenizer_config}, config_with({1, 2, 3, 4}), notes);
  EXPECT_EQ(notes.size(), 1u);
}

// ---- sentence-piece -------------------------------------------------------------------------------------------------

/// A vocabulary whose scores fall with the id, as sentence-piece trains them.
io::GgufMetadata piece_metadata() {
  const Json file = tokenizer_file("llama2");
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;
  for (const auto& [text, id] : file["model"]["vocab"].items()) {
    const int64_t place = id.get<int64_t>();
    tokens.push_back(text);
    types.push_back(place == 0 ? 2 : place < 3 ? 3 : text.size() == 6 && text.starts_with("<0x") ? 6 : 1);
    // Longer tokens arise from shorter ones, so most come later; single characters come last.
    scores.push_back(
        types.back() == 1 ? -static_cast<float>(place) - (text::utf8_size(text[0]) == text.size() ? 1e6f : 0) : 0);
  }
  return {{"tokenizer.ggml.model", std::string("llama")},
          {"tokenizer.ggml.tokens", io::GgufArray(tokens)},
          {"tokenizer.ggml.token_type", io::GgufArray(types)},
          {"tokenizer.ggml.scores", io::GgufArray(scores)}};
}

/// Sentence-piece's rule as it reads: the pair with the best score merges, the leftmost of several.
std::vector<int32_t> encode_by_scores(const io::GgufMetadata& metadata, const std::string& text) {
  const GgufKeys keys(metadata, "m.gguf");
  const auto& tokens = *keys.texts("tokenizer.ggml.tokens");
  const auto& types = *keys.integers("tokenizer.ggml.token_type");
  const auto& scores = *keys.numbers("tokenizer.ggml.scores");
  std::map<std::string, int32_t> ids;
  for (size_t id = 0; id < tokens.size(); ++id) ids[tokens[id]] = static_cast<int32_t>(id);
  std::string spaced(piece_space);
  for (const char c : text) c == ' ' ? spaced += piece_space : spaced += c;
  std::vector<std::string> symbols;
  for (size_t i = 0; i < spaced.size(); i += text::utf8_size(spaced[i]))
    symbols.push_back(spaced.substr(i, text::utf8_size(spaced[i])));
  while (true) {
    size_t best = symbols.size();
    float best_score = -1e30f;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ids.find(symbols[i] + symbols[i + 1]);
      if (found == ids.end() || types[static_cast<size_t>(found->second)] != 1) continue;
      const float score = scores[static_cast<size_t>(found->second)];
      if (score > best_score) best = i, best_score = score;
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::vector<int32_t> result;
  for (const auto& symbol : symbols) {
    if (const auto found = ids.find(symbol); found != ids.end()) {
      result.push_back(found->second);
      continue;
    }
    for (const char byte : symbol) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned char>(byte));
      result.push_back(ids.at(name));
    }
  }
  return result;
}

TEST(GgufTokenizer, PiecesEncodeByTheirScores) {
  const auto metadata = piece_metadata();
  const auto tokenizer = tokenizer::Tokenizer::parse(back_from(metadata).dump(), "pieces");
  const auto cases = io::read_json(test::testdata() / "tokenizers/llama2.expected.json")["cases"];
  int compared = 0;
  for (const auto& test : cases) {
    const std::string text = test["text"];
    // Control tokens in the text are cut out first, which the rule above does not do.
    if (text.empty() || text.size() > 2000 || text.find('<') != std::string::npos) continue;
    EXPECT_EQ(tokenizer.encode(text, false), encode_by_scores(metadata, text)) << text;
    EXPECT_EQ(tokenizer.encode(text, true).front(), 1) << "BOS";
    ++compared;
  }
  EXPECT_GT(compared, 50);
}

TEST(GgufTokenizer, PiecesComeBack) {
  const Json first = back_from(piece_metadata());
  auto metadata = metadata_of(first);
  EXPECT_EQ(at(metadata, "tokenizer.ggml.model"), io::GgufValue(std::string("llama")));
  EXPECT_EQ(at(metadata, "tokenizer.ggml.unknown_token_id"), io::GgufValue(uint32_t{0}));
  EXPECT_EQ(back_from(metadata), first);
  at(metadata, "tokenizer.ggml.add_space_prefix") = false;
  EXPECT_EQ(back_from(metadata)["normalizer"]["type"], "Replace");

  Json metaspace = first;
  metaspace["normalizer"] = nullptr;
  metaspace["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", piece_space}, {"prepend_scheme", "first"}, {"split", false}};
  std::vector<std::string> notes;
  tokenizer_to_gguf({metaspace, Json::object()}, config_with(), notes);
  EXPECT_EQ(notes.size(), 1u);
}

TEST(GgufTokenizer, RefusesPiecesThatMergesCannotExpress) {
  auto metadata = piece_metadata();
  auto& scores = std::get<std::vector<float>>(std::get<io::GgufArray>(at(metadata, "tokenizer.ggml.scores")));
  const auto old = scores;
  std::ranges::fill(scores, 0.0f);
  expect_error(ErrorCode::unsupported, {"two tokens have one score"}, [&] { back_from(metadata); });
  scores.resize(10);
  expect_error(ErrorCode::bad_file, {"tokenizer.ggml.scores", "fewer"}, [&] { back_from(metadata); });
  scores = old;
  auto& tokens = std::get<std::vector<std::string>>(std::get<io::GgufArray>(at(metadata, "tokenizer.ggml.tokens")));
  tokens[800] = std::string(2000, 'x');
  expect_error(ErrorCode::unsupported, {"token 800 has 2000 bytes"}, [&] { back_from(metadata); });
}

}  // namespace
}  // namespace w4q::gguf
