// Files of conversations: the forms that are taken, and what is said of the others.
#include "chat/conversations.h"

#include <gtest/gtest.h>

#include <fstream>

#include "support.h"

namespace w4q::chat {
namespace {

using io::Json;

TEST(Conversations, EveryFormGivesMessages) {
  const Json expected = Json::parse(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])");
  for (const char* line :
       {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})",
        R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])",
        R"({"id": 7, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})",
        R"({"conversations": [{"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}]})"}) {
    const Conversation conversation = parse_conversation(line, "x");
    EXPECT_EQ(conversation.messages, expected) << line;
    EXPECT_EQ(conversation.variables, Json::object()) << line;
    EXPECT_FALSE(conversation.has_parts) << line;
  }
}

TEST(Conversations, ToolsAndVariablesAreKept) {
  const auto conversation = parse_conversation(
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": null,
          "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
          "tools": [{"name": "f"}], "documents": null, "chat_template_kwargs": {"enable_thinking": false}})",
      "x");
  EXPECT_TRUE(conversation.has_parts);
  EXPECT_EQ(conversation.messages[1]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  EXPECT_EQ(conversation.variables, Json::parse(R"({"tools": [{"name": "f"}], "enable_thinking": false})"));
}

TEST(Conversations, MistakesAreNamed) {
  const auto expect = [](const char* line, std::initializer_list<std::string_view> parts,
                         ErrorCode code = ErrorCode::bad_file) {
    SCOPED_TRACE(line);
    test::expect_error(code, parts, [&] { parse_conversation(line, "c.jsonl: line 7"); });
  };
  expect("{", {"c.jsonl: line 7"});
  expect("7", {"c.jsonl: line 7: expected an object or a list of messages, got number", "hint: a line is"});
  expect("{\"text\": \"a\"}", {"c.jsonl: line 7: there is no member 'messages'", "hint: a line is"});
  expect("{\"messages\": \"a\"}", {"c.jsonl: line 7: messages: expected a list, got string"});
  expect("[]", {"c.jsonl: line 7: a conversation without messages"});
  expect("[7]", {"c.jsonl: line 7: message 1: expected an object, got number"});
  expect(R"([{"content": "a"}])", {"line 7: message 1: expected a member 'role'"});
  expect(R"([{"role": 7, "content": "a"}])", {"line 7: message 1: role: expected a text, got number"});
  expect(R"([{"role": "user", "content": 7}])",
         {"line 7: message 1: content: expected a text, null or a list of parts"});
  expect(R"([{"role": "user", "content": ["a"]}])", {"line 7: message 1: content: expected a part"});
  expect(R"([{"role": "user", "content": [{"type": "image", "image": "x"}]}])",
         {"line 7: message 1: content: a part of type 'image'", "leave the conversation out"}, ErrorCode::unsupported);
  expect(R"({"conversations": [{"from": "human", "value": "a"}, {"from": "robot", "value": "a"}]})",
         {"line 7: message 2: unknown speaker 'robot'", "human, gpt"});
  expect(R"({"conversations": [{"from": "human"}]})", {"line 7: message 1: expected a member 'value'"});
  expect(R"({"messages": [{"role": "user", "content": "a"}], "tools": 7})", {"line 7: tools: expected a list"});
  expect(R"({"messages": [{"role": "user", "role": "x"}]})", {"c.jsonl: line 7", "role"});
}

TEST(Conversations, LinesAreCountedAndEmptyOnesLeftOut) {
  const test::TemporaryFolder folder;
  const auto file = folder / "c.jsonl";
  std::ofstream(file)
      << "[{\"role\": \"user\", \"content\": \"a\"}]\r\n\n  \n[{\"role\": \"user\", \"content\": \"b\"}]";
  std::vector<std::string> seen;
  read_conversations(file, [&](Conversation&& conversation, const std::string& place) {
    seen.push_back(place.substr(place.rfind(':') + 2) + " " + conversation.messages[0]["content"].get<std::string>());
  });
  EXPECT_EQ(seen, (std::vector<std::string>{"line 1 a", "line 4 b"}));
  std::ofstream(file) << "\n\n";
  test::expect_error(ErrorCode::bad_file, {"c.jsonl: there is no conversation in it"},
                     [&] { read_conversations(file, [](Conversation&&, const std::string&) {}); });
}

}  // namespace
}  // namespace w4q::chat
