// Conversations by the chat template of a folder: where it is found, what it is given, and the ids.
#include "chat/chat_text.h"

#include <gtest/gtest.h>

#include <fstream>

#include "chat/chat_template.h"
#include "support.h"
#include "tokenizer/tokenizer.h"

namespace w4q::chat {
namespace {

using io::Json;
namespace fs = std::filesystem;

class ChatText : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  void write_config(const Json& config) const { write("tokenizer_config.json", config.dump()); }

  std::string render(const std::string& line, const std::string& date = "2025-01-31") const {
    return ChatTemplate::open(folder_.path()).render(parse_conversation(line, "c"), date);
  }

  const std::string hello = R"([{"role": "user", "content": "Hello"}])";
  const test::TemporaryFolder folder_;
};

TEST_F(ChatText, TheFileOfTemplatesThatWinsIsTheJinjaFile) {
  test::expect_error(ErrorCode::bad_file, {"there is no chat template", "chat_template.jinja"}, [&] { render(hello); });
  write("chat_template.json", R"({"chat_template": "json"})");
  EXPECT_EQ(render(hello), "json");
  write_config({{"chat_template", "config"}});
  EXPECT_EQ(render(hello), "config");
  write("chat_template.jinja", "jinja\n");
  EXPECT_EQ(render(hello), "jinja");
}

TEST_F(ChatText, ListsOfTemplatesAreChosenByTheTools) {
  const std::string tools = R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]})";
  write_config(
      {{"chat_template",
        {{{"name", "default"}, {"template", "plain"}}, {{"name", "tool_use"}, {"template", "tools {{ tools }}"}}}}});
  EXPECT_EQ(render(hello), "plain");
  EXPECT_EQ(render(tools), "tools [{'name': 'f'}]");
  write_config({{"chat_template", {{{"name", "rag"}, {"template", "x"}}}}});
  test::expect_error(ErrorCode::unsupported, {"no chat template is called 'default'", "rag"}, [&] { render(hello); });
  write_config({{"chat_template", {{{"name", "rag"}}}}});
  test::expect_error(ErrorCode::bad_file, {"tokenizer_config.json: chat_template: expected"}, [&] { render(hello); });
}

TEST_F(ChatText, TheTemplateIsGivenTokensAndNoPrompt) {
  write("special_tokens_map.json", R"({"bos_token": "<no>", "unk_token": {"content": "<unk>"}, "pad_token": null})");
  write_config({{"chat_template",
                 "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}|{{ add_generation_prompt }}|{{ tools "
                 "}}|{{ documents }}"},
                {"bos_token", {{"content", "<s>"}}},
                {"eos_token", "</s>"},
                {"add_bos_token", true}});
  EXPECT_EQ(render(hello), "<s></s><unk>|False|None|None");
}

/// What stands around words, which are those of neither; nothing of a template that changes them, or of none.
TEST_F(ChatText, TurnsAreWhatStandsAroundWords) {
  const auto turns = [&](const char* text) {
    write("chat_template.jinja", text);
    return turns_of(folder_.path());
  };
  EXPECT_FALSE(turns_of(folder_.path()));
  const auto two = turns("<s>{% for m in messages %}<|{{ m.role }}|> {{ m.content | trim }}<|end|>\n{% endfor %}");
  ASSERT_TRUE(two);
  EXPECT_EQ(two->opening, "<s><|user|> ");
  EXPECT_EQ(two->answer, "<|end|>\n<|assistant|> ");
  EXPECT_FALSE(turns("{% for m in messages %}{{ m.content | upper }}{% endfor %}"));
  EXPECT_FALSE(turns("{{ messages[0].content }}"));
  EXPECT_FALSE(turns("{% for m in"));
}

TEST_F(ChatText, PartsBecomeOneTextWhereTheTemplateWantsOne) {
  const std::string parts =
      R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c"}])";
  write("chat_template.jinja", "{% for m in messages %}[{{ m.content }}]{% endfor %}");
  EXPECT_EQ(render(parts), "[a\nb][c]");
  write("chat_template.jinja",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ "
        "p.text }}>{% endfor %}{% endif %}{% endfor %}");
  EXPECT_EQ(render(parts), "<a><b>c");
}

TEST_F(ChatText, ErrorsNameTheTemplateAndTheConversation) {
  write("chat_template.jinja", "\n{{ messages[0].content + 1 }}");
  write("c.jsonl", "\n" + hello + "\n");
  test::expect_error(
      ErrorCode::bad_file,
      {"chat_template.jinja: line 2: '+' does not work between str and int", "met in ", "c.jsonl: line 2"},
      [&] { render_chats(folder_.path(), {.path = folder_ / "c.jsonl"}, [](const std::string&) {}); });
  for (const char* date : {"2025-02-30", "2025-1-31", "yesterday", "2025-01-311"}) {
    test::expect_error(ErrorCode::bad_argument, {date, "is no date", "--chat-date"}, [&] {
      render_chats(folder_.path(), {.path = folder_ / "c.jsonl", .date = date}, [](const std::string&) {});
    });
  }
}

TEST_F(ChatText, SpecialTokensAreParsedAndNoneIsAdded) {
  const fs::path model = test::testdata() / "w4q-llama-tiny";
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) fs::copy(model / name, folder_ / name);
  write("chat_template.jinja",
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}");
  write("c.jsonl", hello + "\n" + hello + "\n");
  const auto tokenizer = tokenizer::Tokenizer::open(model);
  const auto text = tokenizer.encode("user: Hello", false);
  const int32_t bos = *tokenizer.token_to_id("<|begin_of_text|>"), eos = *tokenizer.token_to_id("<|end_of_text|>");
  std::vector<int32_t> expected;
  for (int i = 0; i < 2; ++i) {
    expected.push_back(bos);
    expected.insert(expected.end(), text.begin(), text.end());
    expected.push_back(eos);
  }
  EXPECT_EQ(encode_chats(folder_.path(), {.path = folder_ / "c.jsonl"}), expected);
}

}  // namespace
}  // namespace w4q::chat
