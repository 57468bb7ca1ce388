// Conversations in a file, one JSON value a line, as data sets of chats are published.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "io/json.h"

namespace w4q::chat {

struct Conversation {
  io::Json messages;                        ///< objects with role, and whatever else the file gives them
  io::Json variables = io::Json::object();  ///< further ones for the template: tools, documents …
  bool has_parts = false;                   ///< a content is a list of parts, each {"type": "text", "text": …}
};

/// One line of a file: {"messages": […]}, an array of messages, or {"conversations": [{"from": …, "value": …}]}. `place`
/// names it in messages. Throws bad_file saying what is wrong, unsupported where a part is no text.
Conversation parse_conversation(std::string_view line, const std::string& place);

/// Calls `take` with each conversation of a file and with its place, "chats.jsonl: line 7". Empty lines are left out.
/// Throws as parse_conversation(), and bad_file when there is none.
void read_conversations(const std::filesystem::path& path,
                        const std::function<void(Conversation&&, const std::string& place)>& take);

}  // namespace w4q::chat
