// The rung that looks at the tokenizer: what it says of files that are damaged, and of those that are not.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/text.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output.h"
#include "packed_model.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;

class TokenizerRung : public ::testing::Test {
 protected:
  void SetUp() override { model_ = test::quantized_model(folder_, 4); }

  Check check(bool with_base) const {
    CheckContext context(test::check_options(model_, with_base ? test::bundled_model() : fs::path()));
    const Findings findings = climb(context);
    for (const Check& each : findings.checks.checks()) {
      if (each.name == "tokenizer") return each;
    }
    return {"none", true, {}, {}};
  }

  void change(const char* file, const std::function<void(io::Json&)>& how) const {
    io::Json json = io::read_json(model_ / file);
    how(json);
    io::write_file(model_ / file, json.dump(), true);
  }

  void expect_fault(std::string_view part, bool alone) const {
    const Check with_base = check(true);
    ASSERT_FALSE(with_base.passed) << part;
    EXPECT_NE(with_base.faults.front().find(part), std::string::npos) << with_base.faults.front();
    EXPECT_EQ(!check(false).passed, alone) << part;
  }

  void expect_alone(std::string_view part) const {
    const Check alone = check(false);
    EXPECT_FALSE(alone.passed) << part;
    EXPECT_NE(join(alone.faults, "\n").find(part), std::string::npos) << join(alone.faults, "\n");
  }

  test::TemporaryFolder folder_;
  fs::path model_;
};

TEST_F(TokenizerRung, OfTheBaseIsSound) {
  EXPECT_TRUE(check(true).passed);
  EXPECT_NE(check(true).detail.find("1024 ids are those of the base"), std::string::npos);
  EXPECT_TRUE(check(false).passed);
  change("tokenizer.json",
         [](io::Json& json) { json["truncation"] = nullptr; });  // written anew, with the same content
  EXPECT_TRUE(check(true).passed);
}

TEST_F(TokenizerRung, NamesOneThatIsMissing) {
  fs::remove(model_ / "tokenizer.json");
  expect_fault("tokenizer.json is missing: tokenizer_config.json says PreTrainedTokenizerFast", true);
}

TEST_F(TokenizerRung, WithoutOneNothingIsSaid) {
  fs::remove(model_ / "tokenizer.json");
  fs::remove(model_ / "tokenizer_config.json");
  EXPECT_EQ(check(false).name, "none");
  expect_fault("tokenizer.json is missing, the base has one", false);
}

TEST_F(TokenizerRung, NamesAMergeThatIsMissing) {
  change("tokenizer.json", [](io::Json& json) { json["model"]["merges"].erase(100); });
  expect_fault(" ids, with the base's ", true);
  EXPECT_NE(check(false).faults.front().find("no merge makes id 356"), std::string::npos)
      << check(false).faults.front();
  // Another way leads to this token, too.
  change("tokenizer.json", [](io::Json& json) {
    json = io::read_json(test::bundled_model() / "tokenizer.json");
    json["model"]["merges"].erase(json["model"]["merges"].size() - 1);
  });
  expect_fault("", false);
}

TEST_F(TokenizerRung, NamesTokensThatAreExchanged) {
  change("tokenizer.json", [](io::Json& json) {
    auto& vocabulary = json["model"]["vocab"];
    std::swap(std::next(vocabulary.begin(), 300).value(), std::next(vocabulary.begin(), 400).value());
  });
  expect_fault(", in the base ", true);
  EXPECT_NE(check(false).faults.front().find("is exchanged with another"), std::string::npos);
}

TEST_F(TokenizerRung, NamesTokensWithoutAnEmbedding) {
  change("tokenizer.json", [](io::Json& json) { json["model"]["vocab"]["new"] = 1500; });
  expect_fault("id 1500 is \"new\", the embeddings have 1024 rows", true);
}

TEST_F(TokenizerRung, NamesBosAndEosTheOtherWayRound) {
  change("config.json", [](io::Json& json) { std::swap(json["bos_token_id"], json["eos_token_id"]); });
  const Check alone = check(false);
  ASSERT_EQ(alone.faults.size(), 1u);
  EXPECT_NE(alone.faults[0].find("bos_token_id is 1023 and eos_token_id 1022"), std::string::npos) << alone.faults[0];
}

TEST_F(TokenizerRung, NamesOtherSpecialTokens) {
  change("generation_config.json", [](io::Json& json) { json["eos_token_id"] = 5; });
  expect_fault("generation_config.json: eos_token_id is 5, the text ", true);
}

TEST_F(TokenizerRung, NamesFilesThatContradictEachOther) {
  change("tokenizer_config.json", [](io::Json& json) { json["bos_token"] = json["eos_token"]; });
  EXPECT_NE(check(false).faults.front().find("tokenizer_config.json: bos_token is \"<|end_of_text|>\""),
            std::string::npos);
  change("tokenizer.json", [](io::Json& json) { json["pre_tokenizer"] = nullptr; });
  EXPECT_NE(check(false).faults.front().find("the decoder reads letters that stand for bytes"), std::string::npos);
}

TEST_F(TokenizerRung, NamesMergesThatAreNotThere) {
  change("tokenizer.json", [](io::Json& json) { json["model"]["merges"] = io::Json::array(); });
  expect_alone("no merge makes ");
  change("tokenizer.json", [](io::Json& json) {
    json = io::read_json(test::bundled_model() / "tokenizer.json");
    std::ranges::reverse(json["model"]["merges"]);
  });
  expect_alone("merges join what later ones make");
  change("tokenizer.json", [](io::Json& json) { json["model"]["type"] = "WordPiece"; });
  expect_alone("its model is \"WordPiece\" and has ");
}

TEST_F(TokenizerRung, NamesIdsThatFollowTheAlphabet) {
  change("tokenizer.json", [](io::Json& json) {
    std::set<std::string> texts;
    for (const auto& [text, id] : json["model"]["vocab"].items()) texts.insert(text);
    int64_t id = 0;
    for (const auto& text : texts) json["model"]["vocab"][text] = id++;
  });
  expect_alone("tokens follow the alphabet");
}

TEST_F(TokenizerRung, NamesLettersInEachOthersPlace) {
  change("tokenizer.json", [](io::Json& json) { std::swap(json["model"]["vocab"]["a"], json["model"]["vocab"]["b"]); });
  expect_alone("\"b\" and \"a\" have each other's ids");
}

TEST_F(TokenizerRung, NamesIdsThatAreOffByOne) {
  change("tokenizer.json", [](io::Json& json) {
    auto& vocabulary = json["model"]["vocab"];
    const auto count = static_cast<int64_t>(vocabulary.size());
    for (auto& [text, id] : vocabulary.items()) id = (id.get<int64_t>() + 1) % count;
  });
  expect_alone("before all letters for bytes: ids are off by one");
}

TEST_F(TokenizerRung, NamesWhatItAddsUnderOtherIds) {
  change("tokenizer.json", [](io::Json& json) {
    std::string text = json["post_processor"].dump();
    const size_t at = text.find("1022");
    ASSERT_NE(at, std::string::npos);
    json["post_processor"] = io::parse_json(text.replace(at, 4, "7"), "template");
  });
  expect_alone("its post_processor adds 7 as ");
}

TEST_F(TokenizerRung, NamesCapitalsThatNoTextBecomes) {
  change("tokenizer.json", [](io::Json& json) { json["normalizer"] = {{"type", "Lowercase"}}; });
  expect_alone("its normalizer writes all letters small");
}

TEST_F(TokenizerRung, NamesTokensThatAreNotThere) {
  change("tokenizer_config.json", [](io::Json& json) { json["pad_token"] = "<pad>"; });
  expect_alone("tokenizer_config.json: pad_token is \"<pad>\", which is no token");
  change("tokenizer_config.json", [](io::Json& json) {
    json.erase("pad_token");
    json["added_tokens_decoder"] = {{"1021", {{"content", "<|begin_of_text|>"}}}};
  });
  expect_alone("\"<|begin_of_text|>\" is 1021, in tokenizer.json it is 1022");
}

TEST_F(TokenizerRung, NamesEndsWithoutAToken) {
  change("tokenizer.json", [](io::Json& json) {
    json["added_tokens"] = io::Json::array();
    json["post_processor"] = nullptr;
  });
  expect_alone("eos_token_id is 1023, which is no token of tokenizer.json");
}

TEST_F(TokenizerRung, NamesWhatCannotBeGenerated) {
  change("generation_config.json", [](io::Json& json) { json["pad_token_id"] = 99999, json["top_p"] = 2.0; });
  expect_alone("generation_config.json: pad_token_id is 99999, and the embeddings have 1024 rows");
  expect_alone("generation_config.json: top_p is 2.0, expected from 0 to 1");
  change("generation_config.json", [](io::Json& json) {
    json.erase("pad_token_id"), json.erase("top_p");
    json["temperature"] = 0, json["do_sample"] = true;
  });
  expect_alone("generation_config.json: temperature is 0 beside do_sample");
  change("generation_config.json", [](io::Json& json) {
    json.erase("temperature"), json.erase("do_sample");
    json["eos_token_id"] = 1022;
  });
  expect_alone("eos_token_id is 1022, which is config.json's bos_token_id");
  change("generation_config.json", [](io::Json& json) { json["eos_token_id"] = io::Json::array(); });
  expect_alone("eos_token_id is empty");
}

TEST_F(TokenizerRung, NamesATemplateThatCannotBeRead) {
  io::write_file(model_ / "chat_template.jinja", "{% for m in messages %}{{ m.content }{% endfor %}", true);
  expect_alone("chat_template.jinja");
  io::write_file(model_ / "chat_template.jinja", " \n", true);
  expect_alone("chat_template.jinja is empty");
}

TEST_F(TokenizerRung, AFileThatCannotBeReadIsAFinding) {
  fs::resize_file(model_ / "tokenizer.json", 1000);
  expect_fault("tokenizer.json", true);
}

}  // namespace
}  // namespace w4q::verify
