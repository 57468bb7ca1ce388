// Byte pair encoding against its definition, and its speed on one long word.
#include "tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>

#include "io/json.h"
#include "support.h"

namespace w4q::tokenizer {
namespace {

using Merges = std::vector<std::pair<std::string, std::string>>;

io::Json model_of(const Merges& merges) {
  io::Json model = {{"type", "BPE"}, {"vocab", io::Json::object()}, {"merges", io::Json::array()}};
  const auto add = [&](const std::string& token) {
    if (!model["vocab"].contains(token)) model["vocab"][token] = model["vocab"].size();
  };
  for (char c = 'a'; c <= 'd'; ++c) add(std::string(1, c));
  for (const auto& [left, right] : merges) {
    add(left + right);
    model["merges"].push_back({left, right});
  }
  return model;
}

/// The definition: merge the leftmost pair of the lowest rank until none is left.
std::vector<int32_t> encode_by_definition(const io::Json& model, const Merges& merges, std::string_view word) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t i = 0; i < merges.size(); ++i) ranks[merges[i]] = i;
  std::vector<std::string> tokens;
  for (const char c : word) tokens.emplace_back(1, c);
  for (;;) {
    size_t best = merges.size();
    size_t where = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = ranks.find({tokens[i], tokens[i + 1]});
      if (found != ranks.end() && found->second < best) {
        best = found->second;
        where = i;
      }
    }
    if (best == merges.size()) break;
    tokens[where] += tokens[where + 1];
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
  std::vector<int32_t> ids;
  for (const auto& token : tokens) ids.push_back(model.at("vocab").at(token).get<int32_t>());
  return ids;
}

TEST(Bpe, AgreesWithItsDefinitionOnRandomModels) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    Merges merges;
    std::vector<std::string> tokens = {"a", "b", "c", "d"};
    for (int i = 0; i < 30; ++i) {
      merges.emplace_back(tokens[random() % tokens.size()], tokens[random() % tokens.size()]);
      if (merges.back().first.size() + merges.back().second.size() > 12) {
        merges.pop_back();
        continue;
      }
      tokens.push_back(merges.back().first + merges.back().second);
    }
    const io::Json model = model_of(merges);
    const Bpe bpe = Bpe::parse(JsonNode(model, "model"));
    BpeEncoder encoder(bpe, 100);
    for (int i = 0; i < 50; ++i) {
      std::string word;
      for (size_t length = random() % 40; word.size() < length;) word += static_cast<char>('a' + random() % 4);
      std::vector<int32_t> ids;
      encoder.encode(word, ids);
      EXPECT_EQ(ids, encode_by_definition(model, merges, word)) << word;
    }
  }
}

TEST(Bpe, TakesAWholeWordWhenMergesAreIgnored) {
  io::Json model = model_of({{"a", "b"}});
  model["vocab"]["abc"] = 99;
  std::vector<int32_t> ids;
  const Bpe merging = Bpe::parse(JsonNode(model, "model"));
  BpeEncoder(merging, 10).encode("abc", ids);
  model["ignore_merges"] = true;
  const Bpe ignoring = Bpe::parse(JsonNode(model, "model"));
  BpeEncoder(ignoring, 10).encode("abc", ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{4, 2, 99}));
}

TEST(Bpe, EncodesUnknownCharacters) {
  io::Json model = model_of({});
  std::vector<int32_t> ids;
  const auto encode = [&](std::string_view word) {
    const Bpe bpe = Bpe::parse(JsonNode(model, "model"));
    ids.clear();
    BpeEncoder(bpe, 10).encode(word, ids);
    return ids;
  };
  EXPECT_EQ(encode("axyb"), (std::vector<int32_t>{0, 1}));
  model["vocab"]["?"] = 50;
  model["unk_token"] = "?";
  EXPECT_EQ(encode("axyb"), (std::vector<int32_t>{0, 50, 50, 1}));
  model["fuse_unk"] = true;
  EXPECT_EQ(encode("axyb"), (std::vector<int32_t>{0, 50, 1}));
  model["byte_fallback"] = true;
  model["vocab"]["<0x78>"] = 78;
  EXPECT_EQ(encode("axb"), (std::vector<int32_t>{0, 78, 1}));
  EXPECT_EQ(encode("ayb"), (std::vector<int32_t>{0, 50, 1}));
  model["vocab"]["<0xC3>"] = 80;
  EXPECT_EQ(encode("\xC3\xA9"), (std::vector<int32_t>{50})) << "all bytes of a character or none";
  model["vocab"]["<0xA9>"] = 81;
  EXPECT_EQ(encode("\xC3\xA9"), (std::vector<int32_t>{80, 81}));
}

TEST(Bpe, TakesLittleMoreThanLinearTimeOnOneLongWord) {
  Merges merges = {{"a", "b"}, {"ab", "ab"}, {"abab", "abab"}, {"c", "d"}, {"abababab", "cd"}};
  const io::Json model = model_of(merges);
  const Bpe bpe = Bpe::parse(JsonNode(model, "model"));
  std::mt19937 random(3);
  std::string word;
  while (word.size() < 1'000'000) word += random() % 3 == 0 ? "cd" : "ab";
  std::vector<int32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  BpeEncoder(bpe, word.size()).encode(word, ids);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_GT(ids.size(), word.size() / 10);
  // Measured: 0.3 s on a busy machine; an encoder that rescans the word for each merge needs over an hour.
  EXPECT_LT(seconds.count(), 20);
}

}  // namespace
}  // namespace w4q::tokenizer
