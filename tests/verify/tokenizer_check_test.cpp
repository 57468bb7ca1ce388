// The rung that looks at the tokenizer: what it says of files that are damaged, and of those that are not.
#include <filesystem>
#include <fstream>

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

TEST_F(TokenizerRung, AFileThatCannotBeReadIsAFinding) {
  fs::resize_file(model_ / "tokenizer.json", 1000);
  expect_fault("tokenizer.json", true);
}

}  // namespace
}  // namespace w4q::verify
