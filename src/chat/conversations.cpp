#include "chat/conversations.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "io/files.h"

namespace w4q::chat {
namespace {

using io::Json;

/// Who speaks in the files of ShareGPT, and the role.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> speakers{{{"human", "user"},
                                                                                 {"user", "user"},
                                                                                 {"gpt", "assistant"},
                                                                                 {"assistant", "assistant"},
                                                                                 {"system", "system"},
                                                                                 {"tool", "tool"}}};
constexpr std::array<std::string_view, 2> list_keys{"messages", "conversations"};
constexpr std::array<std::string_view, 2> variable_keys{"tools", "documents"};

Error wrong(const std::string& place, std::string_view expected, const Json& got) {
  return Error(ErrorCode::bad_file, concat(place, ": expected ", expected, ", got ", got.type_name()))
      .hint("a line is {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]} (docs/chat.md)");
}

const std::string& text_of(const Json& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end()) throw wrong(place, concat("a member '", key, "'"), object);
  if (!found->is_string()) throw wrong(concat(place, ": ", key), "a text", *found);
  return found->get_ref<const std::string&>();
}

Json from_share_gpt(const Json& object, const std::string& place) {
  const std::string& from = text_of(object, "from", place);
  const auto row = std::ranges::find(speakers, from, &std::pair<std::string_view, std::string_view>::first);
  if (row == speakers.end()) {
    throw Error(ErrorCode::bad_file, concat(place, ": unknown speaker '", printable(from.substr(0, 60)), "'"))
        .hint("\"from\" is human, gpt, system or tool");
  }
  return {{"role", row->second}, {"content", text_of(object, "value", place)}};
}

void check_part(const Json& part, const std::string& place) {
  if (!part.is_object()) throw wrong(place, "a part {\"type\": \"text\", \"text\": …}", part);
  if (const std::string& type = text_of(part, "type", place); type != "text") {
    throw Error(ErrorCode::unsupported, concat(place, ": a part of type '", printable(type.substr(0, 60)), "'"))
        .hint("only text can be decoded: leave the conversation out");
  }
  text_of(part, "text", place);
}

/// Whether the content of a message is a list of parts.
bool check_content(const Json& message, const std::string& place) {
  const auto content = message.find("content");
  if (content == message.end() || content->is_null() || content->is_string()) return false;
  const std::string inside = place + ": content";
  if (!content->is_array()) throw wrong(inside, "a text, null or a list of parts", *content);
  for (const Json& part : *content) check_part(part, inside);
  return true;
}

void add_message(Conversation& conversation, Json message, const std::string& place) {
  if (!message.is_object()) throw wrong(place, "an object", message);
  if (!message.contains("role") && message.contains("from")) message = from_share_gpt(message, place);
  text_of(message, "role", place);
  conversation.has_parts = check_content(message, place) || conversation.has_parts;
  conversation.messages.push_back(std::move(message));
}

/// The member of a line that holds the messages.
Json take_list(Json& line, const std::string& place) {
  if (line.is_array()) return std::move(line);
  if (!line.is_object()) throw wrong(place, "an object or a list of messages", line);
  for (const auto key : list_keys) {
    if (const auto found = line.find(key); found != line.end()) return std::move(*found);
  }
  throw Error(ErrorCode::bad_file, place + ": there is no member 'messages'")
      .detail("nor one that is called 'conversations'")
      .hint("a line is {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]} (docs/chat.md)");
}

void take_variables(Conversation& conversation, const Json& line, const std::string& place) {
  if (!line.is_object()) return;
  for (const auto key : variable_keys) {
    const auto found = line.find(key);
    if (found == line.end() || found->is_null()) continue;
    if (!found->is_array()) throw wrong(concat(place, ": ", key), "a list", *found);
    if (!found->empty()) conversation.variables[std::string(key)] = *found;
  }
  const auto more = line.find("chat_template_kwargs");
  if (more == line.end() || more->is_null()) return;
  if (!more->is_object()) throw wrong(place + ": chat_template_kwargs", "an object", *more);
  conversation.variables.update(*more);
}

}  // namespace

Conversation parse_conversation(std::string_view line, const std::string& place) {
  Json json = io::parse_json(line, place);
  Conversation conversation{.messages = Json::array()};
  Json list = take_list(json, place);
  if (!list.is_array()) throw wrong(place + ": messages", "a list", list);
  if (list.empty())
    throw Error(ErrorCode::bad_file, place + ": a conversation without messages").hint("leave the line out");
  for (size_t i = 0; i < list.size(); ++i)
    add_message(conversation, std::move(list[i]), concat(place, ": message ", i + 1));
  take_variables(conversation, json, place);
  return conversation;
}

void read_conversations(const std::filesystem::path& path,
                        const std::function<void(Conversation&&, const std::string& place)>& take) {
  const std::string text = io::read_file(path);
  int64_t number = 0, count = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = concat(path.string(), ": line ", number);
    take(parse_conversation(line, place), place);
    ++count;
  }
  if (count > 0) return;
  throw Error(ErrorCode::bad_file, path.string() + ": there is no conversation in it")
      .hint("a line is {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]} (docs/chat.md)");
}

}  // namespace w4q::chat
