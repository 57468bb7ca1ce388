#include "chat/chat_text.h"

#include <chrono>
#include <cstdio>

#include "chat/chat_template.h"
#include "core/error.h"
#include "core/text.h"
#include "tokenizer/tokenizer.h"

namespace w4q::chat {

void check_date(const std::string& date) {
  int year = 0;
  unsigned month = 0, day = 0;
  char more = 0;
  const bool read = date.size() == 10 && std::sscanf(date.c_str(), "%4d-%2u-%2u%c", &year, &month, &day, &more) == 3;
  const std::chrono::year_month_day found{std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)};
  if (read && year > 0 && found.ok()) return;
  throw Error(ErrorCode::bad_argument, concat("'", printable(date), "' is no date")).hint("--chat-date 2025-01-31");
}

void render_chats(const std::filesystem::path& folder, const ChatFile& file,
                  const std::function<void(const std::string& text)>& take) {
  check_date(file.date);
  const ChatTemplate chat = ChatTemplate::open(folder);
  read_conversations(file.path, [&](Conversation&& conversation, const std::string& place) {
    std::string text;
    try {
      text = chat.render(conversation, file.date);
    } catch (Error& error) {
      error.detail(concat("met in ", place));
      throw;
    }
    take(text);
  });
}

std::vector<int32_t> encode_chats(const tokenizer::Tokenizer& tokenizer, const std::filesystem::path& folder,
                                  const ChatFile& file, size_t* bytes) {
  std::vector<int32_t> ids;
  render_chats(folder, file, [&](const std::string& text) {
    if (bytes != nullptr) *bytes += text.size();
    const auto more = tokenizer.encode(text, false);
    ids.insert(ids.end(), more.begin(), more.end());
  });
  return ids;
}

std::optional<Turns> turns_of(const std::filesystem::path& folder) {
  const std::string asked = "Wq4asked", answered = "Wq4answered";
  std::string text;
  try {
    const io::Json messages = {{{"role", "user"}, {"content", asked}}, {{"role", "assistant"}, {"content", answered}}};
    text = ChatTemplate::open(folder).render({.messages = messages}, std::string(default_date));
  } catch (const Error&) {
    return std::nullopt;
  }
  const size_t first = text.find(asked), second = text.find(answered);
  if (first == std::string::npos || second == std::string::npos || second < first) return std::nullopt;
  const size_t behind = first + asked.size();
  return Turns{text.substr(0, first), text.substr(behind, second - behind)};
}

std::vector<int32_t> encode_chats(const std::filesystem::path& folder, const ChatFile& file) {
  return encode_chats(tokenizer::Tokenizer::open(folder), folder, file);
}

}  // namespace w4q::chat
