// Damaged and hostile tokenizer.json files: each gives one clear error that names the place.
#include <gtest/gtest.h>

#include <array>

#include "io/json.h"
#include "support.h"
#include "tokenizer/tokenizer.h"

namespace w4q::tokenizer {
namespace {

/// A small valid file; each test replaces one part of it.
io::Json valid_file() {
  return io::Json::parse(R"({
    "added_tokens": [{"id": 4, "content": "<s>", "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
    "post_processor": null,
    "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, " ": 3}, "merges": [["a", "b"]]}
  })");
}

Tokenizer parse(const io::Json& file) { return Tokenizer::parse(file.dump(), "t.json"); }

io::Json with(const char* pointer, const char* value) {
  io::Json file = valid_file();
  file[io::Json::json_pointer(pointer)] = io::Json::parse(value);
  return file;
}

io::Json without(const char* parent, const char* key) {
  io::Json file = valid_file();
  file.at(io::Json::json_pointer(parent)).erase(key);
  return file;
}

TEST(TokenizerFile, ReadsTheValidOne) {
  const Tokenizer tokenizer = parse(valid_file());
  EXPECT_EQ(tokenizer.encode("ab ba<s>", false), (std::vector<int32_t>{2, 3, 1, 0, 4}));
  EXPECT_EQ(tokenizer.decode({{2, 3, 4}}, true), "ab ");
  EXPECT_EQ(tokenizer.vocab_size(), 5);
}

struct BadFile {
  const char* name;
  const char* pointer;
  const char* value;
  ErrorCode code;
  std::array<std::string_view, 3> message;  ///< parts of it
};

class Malformed : public ::testing::TestWithParam<BadFile> {};

TEST_P(Malformed, IsRefusedWithThePlace) {
  const BadFile& bad = GetParam();
  test::expect_error(bad.code, {bad.message[0], bad.message[1], bad.message[2]},
                     [&] { parse(with(bad.pointer, bad.value)); });
}

constexpr auto file = ErrorCode::bad_file;
constexpr auto other = ErrorCode::unsupported;

INSTANTIATE_TEST_SUITE_P(
    Types, Malformed,
    ::testing::Values(
        BadFile{"model", "/model", "[]", file, {"t.json: /model", "expected an object"}},
        BadFile{"vocab", "/model/vocab", "[1]", file, {"/model/vocab"}},
        BadFile{"merges", "/model/merges", "{}", file, {"/model/merges", "array"}},
        BadFile{"merge", "/model/merges/0", "7", file, {"/model/merges/0", "two tokens", "7"}},
        BadFile{"merge_of_three", "/model/merges/0", "\"a b c\"", file, {"/model/merges/0", "two tokens"}},
        BadFile{"merge_pair", "/model/merges/0", "[\"a\", 1]", file, {"/model/merges/0"}},
        BadFile{"unk", "/model/unk_token", "3", file, {"/model/unk_token", "a string"}},
        BadFile{"fuse_unk", "/model/fuse_unk", "1", file, {"/model/fuse_unk", "true or false"}},
        BadFile{"added", "/added_tokens", "{}", file, {"/added_tokens", "array"}},
        BadFile{"added_item", "/added_tokens/0", "[]", file, {"/added_tokens/0", "object"}},
        BadFile{"content", "/added_tokens/0/content", "1", file, {"/added_tokens/0/content"}},
        BadFile{"type", "/pre_tokenizer/type", "null", file, {"/pre_tokenizer"}},
        BadFile{"pattern", "/pre_tokenizer/pattern", "\"x\"", file, {"/pre_tokenizer/pattern"}},
        BadFile{"behavior", "/pre_tokenizer/behavior", "\"Other\"", file, {"/pre_tokenizer/behavior", "Isolated"}},
        BadFile{"normalizer", "/normalizer", "\"NFC\"", file, {"/normalizer"}},
        BadFile{"replacement",
                "/pre_tokenizer",
                R"({"type":"Metaspace","replacement":"__"})",
                file,
                {"/pre_tokenizer/replacement", "one character"}},
        BadFile{"template_id",
                "/post_processor",
                R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}],
                    "special_tokens":{"x":{"ids":[99]}}})",
                file,
                {"/post_processor/special_tokens/x/ids/0", "99"}},
        BadFile{"template_name",
                "/post_processor",
                R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"y"}}],"special_tokens":{}})",
                file,
                {"/post_processor/special_tokens", "y"}}),
    [](const auto& item) { return item.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Ids, Malformed,
    ::testing::Values(
        BadFile{"negative", "/model/vocab/a", "-1", file, {"/model/vocab/a", "-1"}},
        BadFile{"huge", "/model/vocab/a", "4000000000", file, {"/model/vocab/a"}},
        BadFile{"beyond_64_bits", "/model/vocab/a", "1e30", file, {"/model/vocab/a"}},
        BadFile{"fraction", "/model/vocab/a", "1.5", file, {"/model/vocab/a", "1.5"}},
        BadFile{"text", "/model/vocab/a", "\"0\"", file, {"/model/vocab/a"}},
        BadFile{"twice", "/model/vocab/b", "0", file, {"\"a\"", "\"b\"", "same id 0"}},
        BadFile{"unknown_in_merge", "/model/merges", R"([["a","b"],["b","q"]])", file, {"merge 1", "\"q\""}},
        BadFile{"merged_is_unknown", "/model/merges", R"(["b a"])", file, {"merge 0", "missing: \"ba\""}},
        BadFile{"added_negative", "/added_tokens/0/id", "-4", file, {"/added_tokens/0/id"}},
        BadFile{"added_taken", "/added_tokens/0/id", "1", file, {"<s>", "\"b\""}},
        BadFile{"added_elsewhere", "/added_tokens/0/content", "\"ab\"", file, {"ab", "its id is 2"}},
        BadFile{"added_twice", "/added_tokens/1", R"({"id":5,"content":"<s>"})", file, {"<s>", "listed twice"}}),
    [](const auto& item) { return item.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Unsupported, Malformed,
    ::testing::Values(
        BadFile{"wordpiece", "/model/type", "\"WordPiece\"", other, {"WordPiece", "not supported", "BPE"}},
        BadFile{"wordlevel", "/model/type", "\"WordLevel\"", other, {"WordLevel"}},
        BadFile{"dropout", "/model/dropout", "0.1", other, {"/model/dropout"}},
        BadFile{"prefix", "/model/continuing_subword_prefix", "\"##\"", other, {"continuing_subword_prefix"}},
        BadFile{"suffix", "/model/end_of_word_suffix", "\"</w>\"", other, {"end_of_word_suffix"}},
        BadFile{"bert", "/normalizer", R"({"type":"BertNormalizer"})", other, {"normalizer", "BertNormalizer"}},
        BadFile{"precompiled", "/normalizer", R"({"type":"Precompiled"})", other, {"Precompiled"}},
        BadFile{"scripts", "/pre_tokenizer", R"({"type":"UnicodeScripts"})", other, {"UnicodeScripts"}},
        BadFile{"ctc", "/decoder", R"({"type":"CTC"})", other, {"decoder", "CTC"}},
        BadFile{"post", "/post_processor", R"({"type":"Other"})", other, {"post-processor", "Other"}},
        BadFile{"regex", "/pre_tokenizer/pattern/Regex", "\"(a\"", other, {"/pre_tokenizer/pattern/Regex", "(a"}},
        BadFile{"regex_verb", "/pre_tokenizer/pattern/Regex", "\"(*NO_JIT)a\"", other, {"(*"}}),
    [](const auto& item) { return item.param.name; });

TEST(TokenizerFile, NamesWhatIsMissing) {
  test::expect_error(file, {"lacks \"model\""}, [] { parse(without("", "model")); });
  test::expect_error(file, {"/model", "\"vocab\""}, [] { parse(without("/model", "vocab")); });
  test::expect_error(file, {"/model", "\"merges\""}, [] { parse(without("/model", "merges")); });
  test::expect_error(file, {"/pre_tokenizer", "\"pattern\""}, [] { parse(without("/pre_tokenizer", "pattern")); });
  test::expect_error(file, {"/added_tokens/0", "\"id\""}, [] { parse(without("/added_tokens/0", "id")); });
}

TEST(TokenizerFile, NeedsNoOptionalParts) {
  const Tokenizer tokenizer = Tokenizer::parse(R"({"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})", "t");
  EXPECT_EQ(tokenizer.encode("abzba", false), (std::vector<int32_t>{2, 1, 0}));
  EXPECT_EQ(tokenizer.decode({{2, 1}}, false), "ab b");
}

TEST(TokenizerFile, RefusesEveryCutFile) {
  const std::string text = valid_file().dump();
  for (size_t size = 0; size < text.size(); ++size) {
    test::expect_error(file, {"t.json"}, [&] { Tokenizer::parse(text.substr(0, size), "t.json"); });
  }
}

TEST(TokenizerFile, RefusesTextThatGrowsWithoutEnd) {
  io::Json sequence = {{"type", "Sequence"}, {"normalizers", io::Json::array()}};
  for (int i = 0; i < 60; ++i) {
    sequence["normalizers"].push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  }
  const Tokenizer tokenizer = parse(with("/normalizer", sequence.dump().c_str()));
  test::expect_error(other, {"longer"}, [&] { tokenizer.encode("aaaa", false); });
}

TEST(TokenizerFile, RefusesAnEndlessRegularExpression) {
  // The last letter is there, or PCRE2 would see at once that nothing can match.
  const std::string text = std::string(20'000, 'a') + "xb";
  for (const char* pattern : {"(a+)+$b", "a*a*a*a*b", "(a|aa)+$b", "(?:a?){40}a{40}b"}) {
    io::Json damaged = valid_file();
    damaged["pre_tokenizer"]["pattern"]["Regex"] = pattern;
    const Tokenizer tokenizer = parse(damaged);
    test::expect_error(other, {"/pre_tokenizer/pattern/Regex", "too costly"}, [&] { tokenizer.encode(text, false); });
  }
}

TEST(TokenizerFile, ReportsAnUnknownTokenThatTheVocabularyLacks) {
  const Tokenizer tokenizer = parse(with("/model/unk_token", "\"<unk>\""));
  EXPECT_EQ(tokenizer.encode("ab", false), (std::vector<int32_t>{2}));
  test::expect_error(file, {"<unk>"}, [&] { tokenizer.encode("xyz", false); });
}

}  // namespace
}  // namespace w4q::tokenizer
