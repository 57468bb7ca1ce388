// --chat as a user gives it: a model with a chat template calibrates, verifies and compares on conversations.
#include <fstream>

#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

class ChatCommand : public ::testing::Test {
 protected:
  ChatCommand() : model_(copy_bundled_model(folder_ / "model")), chats_((folder_ / "chats.jsonl").string()) {
    fs::copy(testdata() / "chat/templates/turns.jinja", fs::path(model_) / "chat_template.jinja");
    std::ofstream out(chats_);
    for (int i = 0; i < 40; ++i) {
      out << R"([{"role": "user", "content": "What is )" << i
          << R"( plus one?"}, {"role": "assistant", "content": "It is )" << i + 1 << ".\"}]\n";
    }
  }

  /// The ids of the conversations, as tokenize writes them.
  std::string ids() const {
    const std::string file = (folder_ / "ids.u16").string();
    EXPECT_EQ(run_w4q({"tokenize", model_, "--chat", chats_, "-o", file, "--quiet"}).status, 0);
    return file;
  }

  const TemporaryFolder folder_;
  const std::string model_, chats_;
};

TEST_F(ChatCommand, TokenizeShowsWhatTheModelSees) {
  const auto shown = run_w4q({"tokenize", model_, "--chat", chats_, "--render", "--json"});
  ASSERT_EQ(shown.status, 0) << shown.err;
  const auto texts = shown.json()["texts"];
  ASSERT_EQ(texts.size(), 40u);
  EXPECT_EQ(texts[1], "<|begin_of_text|><|user|>\nWhat is 1 plus one?<|assistant|>\nIt is 2.<|end_of_text|>");
  const auto plain = run_w4q({"tokenize", model_, "--chat", chats_, "--render"});
  EXPECT_TRUE(plain.out.starts_with(texts[0].get<std::string>() + texts[1].get<std::string>())) << plain.out;
  EXPECT_GT(fs::file_size(ids()), 40u * 2 * 10);
}

TEST_F(ChatCommand, StatisticsAreThoseOfItsIds) {
  const auto calibrate = [&](const std::string& option, const std::string& file, const std::string& name) {
    const std::string out = (folder_ / name).string();
    const auto result =
        run_w4q({"calibrate", model_, option, file, "-o", out, "--samples", "4", "--length", "64", "--quiet"});
    EXPECT_EQ(result.status, 0) << result.err;
    return io::read_file(out);
  };
  EXPECT_EQ(calibrate("--chat", chats_, "a.safetensors"), calibrate("--ids", ids(), "b.safetensors"));
}

TEST_F(ChatCommand, QuantizeVerifyAndCompareTakeIt) {
  const std::string out = (folder_ / "out").string();
  const auto made = run_w4q({"quantize", model_, "-o", out, "--method", "awq", "--bits", "4", "--group", "128",
                             "--chat", chats_, "--samples", "4", "--length", "64", "--quiet"});
  ASSERT_EQ(made.status, 0) << made.err;
  const auto perplexity = [&](const std::string& option, const std::string& file) {
    const auto result = run_w4q({"verify", out, option, file, "--ctx", "64", "--windows", "4", "--quiet", "--json"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["perplexity"];
  };
  const std::string file = ids();
  EXPECT_EQ(perplexity("--chat", chats_)["perplexity"], perplexity("--ids", file)["perplexity"]);
  const auto compare = [&](const std::string& option, const std::string& text) {
    const auto result = run_w4q(
        {"compare", out, model_, "--base", model_, option, text, "--ctx", "64", "--windows", "4", "--quiet", "--json"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["nll_difference"];
  };
  EXPECT_EQ(compare("--chat", chats_), compare("--ids", file));
}

TEST_F(ChatCommand, MistakesAreExplained) {
  const auto expect = [&](int status, const std::vector<std::string>& arguments, std::string_view part) {
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, status) << result.out << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  };
  const std::string out = (folder_ / "x").string(), text = bundled_model() + "/own/selfgen.txt";
  expect(2, {"calibrate", model_, "--chat", chats_, "--text", text, "-o", out}, "--chat");
  expect(2, {"quantize", model_, "-o", out, "--method", "awq", "--bits", "4", "--chat", chats_, "--calib", text},
         "--chat");
  expect(2, {"verify", model_, "--chat", chats_, "--ppl", text}, "--chat");
  expect(2, {"verify", model_, "--chat", chats_, "--bos"}, "the chat template writes BOS itself");
  expect(2, {"compare", model_, model_, "--base", model_, "--chat", chats_, "--ppl", text}, "--chat");
  expect(2, {"tokenize", model_, "--chat", chats_, text, "--render"}, "--chat");
  expect(2, {"tokenize", model_, "--chat", chats_}, "--render");
  expect(2, {"tokenize", model_, text, "--render"}, "--chat");
  expect(2, {"tokenize", model_, "--chat", chats_, "--render", "--chat-date", "2025-02-30"}, "is no date");
  expect(3, {"tokenize", bundled_model(), "--chat", chats_, "--render"}, "there is no chat template");
  std::ofstream(chats_, std::ios::app) << "{\"messages\": 7}\n";
  expect(3, {"calibrate", model_, "--chat", chats_, "-o", out}, "chats.jsonl: line 41: messages: expected a list");
  std::ofstream(fs::path(model_) / "chat_template.jinja") << "\n{{ messages|nothing }}";
  expect(3, {"verify", model_, "--chat", chats_}, "chat_template.jinja: line 2: there is no filter 'nothing'");
  EXPECT_FALSE(fs::exists(out));
}

}  // namespace
}  // namespace w4q::test
