// The tokenizer against the reference implementation: whole corpora, and hard texts for every component.
#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "core/rng.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "io/files.h"
#include "io/json.h"
#include "support.h"

namespace w4q::tokenizer {
namespace {

using ::w4q::test::shared_data;
using ::w4q::test::testdata;

std::vector<int32_t> read_u16(const std::filesystem::path& path) {
  const std::string bytes = io::read_file(path);
  std::vector<int32_t> ids(bytes.size() / 2);
  for (size_t i = 0; i < ids.size(); ++i) {
    uint16_t id = 0;
    std::memcpy(&id, bytes.data() + 2 * i, sizeof id);
    ids[i] = id;
  }
  return ids;
}

/// Encodes a whole file in one piece and expects the stored ids; decoding gives the file back.
void expect_ids(const Tokenizer& tokenizer, const std::filesystem::path& text, const std::filesystem::path& ids) {
  SCOPED_TRACE(ids.string());
  const std::string content = io::read_file(text);
  const auto expected = read_u16(ids);
  const auto got = tokenizer.encode(content, false);
  EXPECT_GT(expected.size(), 1000U);
  // Not EXPECT_EQ, which would print half a million numbers.
  EXPECT_TRUE(got == expected) << got.size() << " ids, expected " << expected.size();
  EXPECT_TRUE(tokenizer.decode(got, false) == content);
}

TEST(Tokenizer, EncodesTheBundledTextExactly) {
  const auto folder = testdata() / "w4q-llama-tiny";
  const Tokenizer tokenizer = Tokenizer::open(folder);
  expect_ids(tokenizer, folder / "own" / "selfgen.txt", folder / "own" / "selfgen.ids.u16");
  EXPECT_EQ(tokenizer.vocab_size(), 1024);
  EXPECT_EQ(tokenizer.token_to_id("<|begin_of_text|>"), 1022);
  EXPECT_EQ(tokenizer.token_to_id("no such token"), std::nullopt);
}

TEST(Tokenizer, EncodesWholeCorporaExactly) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* model : {"w4q-llama-tiny", "w4q-llama-30m"}) {
    const auto folder = shared_data() / "models" / model;
    const auto corpora = shared_data() / "corpora";
    const Tokenizer tokenizer = Tokenizer::open(folder);
    expect_ids(tokenizer, corpora / "wiki.test.raw", folder / "ref" / "wiki.test.ids.u16");
    for (const std::string name : {"held-wiki", "held-books", "held-docs", "calib"}) {
      expect_ids(tokenizer, corpora / (name + ".txt"), folder / "ref" / (name + ".ids.u16"));
    }
  }
}

// The files in testdata/tokenizers: BPE models trained with the Python package `tokenizers` on a page of text written
// for the purpose, one per style of published models and some with everything else that a file may ask for. The
// expected ids and texts are what that package (0.21.0 and 0.23.3, where both agree) gives for hard texts: scripts,
// combining marks, conjoining Hangul, emoji sequences, rare spaces, contractions, control characters, added tokens in
// every position, and random mixtures of these.
class GoldenTokenizer : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenTokenizer, AgreesWithTheReference) {
  const auto folder = testdata() / "tokenizers";
  const std::string name = GetParam();
  const auto path = folder / (name + ".json");
  const Tokenizer tokenizer = Tokenizer::parse(io::read_file(path), path.native());
  const io::Json expected = io::read_json(folder / (name + ".expected.json"));
  ASSERT_GT(expected.at("cases").size(), 50U);
  for (const auto& item : expected.at("cases")) {
    const auto text = item.at("text").get<std::string>();
    SCOPED_TRACE(item.at("text").dump());
    const auto ids = tokenizer.encode(text, true);
    EXPECT_EQ(tokenizer.encode(text, false), item.at("ids").get<std::vector<int32_t>>());
    EXPECT_EQ(ids, item.at("ids_with_special").get<std::vector<int32_t>>());
    EXPECT_EQ(tokenizer.decode(ids, false), item.at("decoded").get<std::string>());
    EXPECT_EQ(tokenizer.decode(ids, true), item.at("decoded_without_special").get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, GoldenTokenizer,
                         ::testing::Values("llama3", "qwen2", "gpt2", "llama2", "mistral", "mixed", "plain", "odd",
                                           "unigram"),
                         [](const auto& item) { return std::string(item.param); });

TEST(Tokenizer, ReplacesInvalidUtf8LikeTheReference) {
  const Tokenizer tokenizer = Tokenizer::open(testdata() / "w4q-llama-tiny");
  const std::string mark = "\xEF\xBF\xBD";
  // Lone bytes, a cut character, an overlong form, a surrogate, a value above U+10FFFF: what Python's
  // bytes.decode("utf-8", "replace") makes of them.
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\xFF"
       "b",
       "a" + mark + "b"},
      {"\xE2\x82", mark},
      {"\xE2\x82z", mark + "z"},
      {"\xC0\xAF", mark + mark},
      {"\xED\xA0\x80", mark + mark + mark},
      {"\xF4\x90\x80\x80", mark + mark + mark + mark},
      {"\xF0\x9F\x98", mark},
      {"\x80\x80", mark + mark},
  };
  for (const auto& [bytes, repaired] : cases) {
    EXPECT_EQ(tokenizer.encode(bytes, false), tokenizer.encode(repaired, false));
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes, false), false), repaired);
  }
}

TEST(Tokenizer, DecodesTornCharactersAsReplacementCharacters) {
  const Tokenizer tokenizer = Tokenizer::open(testdata() / "w4q-llama-tiny");
  std::vector<int32_t> ids = tokenizer.encode("\xF0\x9F\xA6\x94", false);  // a hedgehog, one token per byte
  ASSERT_EQ(ids.size(), 4U);
  ids.pop_back();
  EXPECT_EQ(tokenizer.decode(ids, false), "\xEF\xBF\xBD");
}

/// What a stream should give: everything decoded anew for each id, and nothing while the text ends inside a character.
class DecodedAnew {
 public:
  explicit DecodedAnew(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  std::string add(int32_t id) {
    ids_.push_back(id);
    const std::string text = tokenizer_.decode(ids_, true);
    return text.ends_with("\xEF\xBF\xBD") ? std::string() : rest(text);
  }
  std::string finish() { return rest(tokenizer_.decode(ids_, true)); }

 private:
  std::string rest(const std::string& text) {
    if (text.size() <= given_) return {};
    std::string added = text.substr(given_);
    given_ = text.size();
    return added;
  }

  const Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;
  size_t given_ = 0;
};

/// Returns the whole text.
std::string expect_stream(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  TextStream stream(tokenizer);
  DecodedAnew anew(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string added = stream.add(id);
    EXPECT_EQ(added, anew.add(id));
    text += added;
  }
  const std::string last = stream.finish();
  EXPECT_EQ(last, anew.finish());
  return text + last;
}

/// Ids that a model might put out at its worst: any, of which one in three is a byte where the file has such tokens.
std::vector<int32_t> random_ids(const Tokenizer& tokenizer, uint64_t seed) {
  std::vector<int32_t> ids;
  for (uint64_t draw = 0; ids.size() < 60; ++draw) {
    const uint64_t bits = random_bits(seed, draw);
    constexpr std::string_view digits = "0123456789ABCDEF";
    const auto byte = tokenizer.token_to_id(concat("<0x", digits[bits >> 8 & 15], digits[bits >> 12 & 15], ">"));
    const auto any = static_cast<int32_t>((bits >> 16) % static_cast<uint64_t>(tokenizer.vocab_size()));
    ids.push_back(bits % 3 == 0 ? byte.value_or(any) : any);
  }
  return ids;
}

TEST_P(GoldenTokenizer, StreamsWhatItDecodes) {
  const auto folder = testdata() / "tokenizers";
  const std::string name = GetParam();
  const Tokenizer tokenizer = Tokenizer::parse(io::read_file(folder / (name + ".json")), name);
  std::vector<int32_t> all;
  const io::Json expected = io::read_json(folder / (name + ".expected.json"));
  for (const auto& item : expected.at("cases")) {
    SCOPED_TRACE(item.at("text").dump());
    const auto ids = item.at("ids_with_special").get<std::vector<int32_t>>();
    expect_stream(tokenizer, ids);
    all.insert(all.end(), ids.begin(), ids.end());
  }
  all.resize(std::min<size_t>(all.size(), 1000));
  expect_stream(tokenizer, all);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    expect_stream(tokenizer, random_ids(tokenizer, seed));
  }
}

/// Steps behind one that makes one token of all look at the whole text.
TEST(Tokenizer, StreamsThroughAnyDecoder) {
  io::Json file = io::read_json(testdata() / "tokenizers" / "llama2.json");
  const char* const fuse = R"({"type": "Fuse"})";
  const char* const bytes = R"({"type": "ByteFallback"})";
  const char* const spaces = R"({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"})";
  const char* const replace = R"({"type": "Replace", "pattern": {"Regex": "e.|\u2581"}, "content": " - "})";
  const char* const strip = R"({"type": "Strip", "content": "\u2581", "start": 2, "stop": 1})";
  const char* const begin = R"({"type": "Strip", "content": "\u2581", "start": 2, "stop": 0})";
  const std::vector<std::vector<const char*>> decoders{{},
                                                       {spaces},
                                                       {bytes},
                                                       {bytes, spaces},
                                                       {spaces, bytes},
                                                       {replace, bytes},
                                                       {strip},
                                                       {strip, bytes, fuse},
                                                       {bytes, fuse, begin, fuse},
                                                       {bytes, fuse, strip},
                                                       {fuse, replace},
                                                       {bytes, fuse, spaces},
                                                       {fuse, bytes}};
  for (const auto& steps : decoders) {
    file["decoder"] = nullptr;
    if (!steps.empty()) file["decoder"] = {{"type", "Sequence"}, {"decoders", io::Json::array()}};
    for (const char* step : steps) file["decoder"]["decoders"].push_back(io::Json::parse(step));
    SCOPED_TRACE(file["decoder"].dump());
    const Tokenizer tokenizer = Tokenizer::parse(file.dump(), "test");
    expect_stream(tokenizer, tokenizer.encode("  every one of these \xF0\x9F\xA6\x94\xE2\x82\xAC has an end  ", true));
    for (uint64_t seed = 0; seed < 20; ++seed) expect_stream(tokenizer, random_ids(tokenizer, seed));
  }
}

TEST(Tokenizer, StreamsGiveWholeCharactersAndTheRestAtTheEnd) {
  const Tokenizer tokenizer = Tokenizer::open(testdata() / "w4q-llama-tiny");
  const auto ids = tokenizer.encode("\xF0\x9F\xA6\x94", false);  // a hedgehog, one token per byte
  ASSERT_EQ(ids.size(), 4U);
  TextStream stream(tokenizer);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(stream.add(ids[i]), "");
  EXPECT_EQ(stream.add(ids[3]), "\xF0\x9F\xA6\x94");
  EXPECT_EQ(stream.add(ids[0]), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  test::expect_error(ErrorCode::bad_argument, {"token id", "1024"}, [&] { stream.add(1024); });
}

/// Decoded anew for each of so many ids, a text would take minutes.
TEST(Tokenizer, StreamsTakeAsLongAsTheyAre) {
  for (const char* name : {"gpt2", "llama2", "mistral"}) {
    const std::string json = io::read_file(testdata() / "tokenizers" / (std::string(name) + ".json"));
    const Tokenizer tokenizer = Tokenizer::parse(json, name);
    const auto ids = tokenizer.encode(" a text that goes on and on, \xE2\x82\xAC by \xE2\x82\xAC.\n", false);
    TextStream stream(tokenizer);
    const Stopwatch watch;
    for (size_t i = 0; i < 200'000; ++i) stream.add(ids[i % ids.size()]);
    EXPECT_LT(watch.seconds(), 20) << name;
  }
}

TEST(Tokenizer, RefusesUnknownIds) {
  const Tokenizer tokenizer = Tokenizer::open(testdata() / "w4q-llama-tiny");
  for (const int32_t id : {-1, 1024, INT32_MAX, INT32_MIN}) {
    test::expect_error(ErrorCode::bad_argument, {"token id", "1024"}, [&] { tokenizer.decode({{id}}, false); });
  }
}

TEST(Tokenizer, IsSafeToShareBetweenThreads) {
  const auto folder = testdata() / "w4q-llama-tiny";
  const Tokenizer tokenizer = Tokenizer::open(folder);
  const std::string text = io::read_file(folder / "own" / "selfgen.txt");
  const auto expected = tokenizer.encode(text, false);
  std::vector<std::vector<int32_t>> got(4);
  std::vector<std::thread> threads;
  for (auto& ids : got) threads.emplace_back([&] { ids = tokenizer.encode(text, false); });
  for (auto& thread : threads) thread.join();
  for (const auto& ids : got) EXPECT_TRUE(ids == expected);
}

TEST(Tokenizer, NamesAMissingFile) {
  const test::TemporaryFolder folder;
  test::expect_error(ErrorCode::bad_file, {"tokenizer.json"}, [&] { Tokenizer::open(folder.path()); });
}

}  // namespace
}  // namespace w4q::tokenizer
