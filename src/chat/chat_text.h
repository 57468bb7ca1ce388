// A file of conversations as the text and the token ids that the model sees.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::tokenizer {
class Tokenizer;
}

namespace w4q::chat {

/// What templates take for today where nothing else is said: what is rendered must not depend on the day.
inline constexpr std::string_view default_date = "2025-01-01";

/// A file of conversations, and the date that templates are told.
struct ChatFile {
  std::filesystem::path path = {};  ///< empty: none
  std::string date = std::string(default_date);

  bool empty() const noexcept { return path.empty(); }
};

/// Throws bad_argument unless `date` is a day of the calendar, "2025-01-31".
void check_date(const std::string& date);

/// Calls `take` with the text of each conversation of the file, by the chat template of `folder`. Throws as
/// ChatTemplate and read_conversations() do; what a conversation does to the template names its line too.
void render_chats(const std::filesystem::path& folder, const ChatFile& file,
                  const std::function<void(const std::string& text)>& take);

/// The ids of all of them, one conversation behind the other. Special tokens are those that the template writes: none
/// is added. `bytes`, where given, counts those of the texts.
std::vector<int32_t> encode_chats(const tokenizer::Tokenizer& tokenizer, const std::filesystem::path& folder,
                                  const ChatFile& file, size_t* bytes = nullptr);
/// What a template writes before a user's words, and between these and the answer to them.
struct Turns {
  std::string opening, answer;
};
/// Of the chat template of `folder`; nothing where it has none that can be used, or one that does not write words as they
/// are.
std::optional<Turns> turns_of(const std::filesystem::path& folder);

/// With the tokenizer of `folder`.
std::vector<int32_t> encode_chats(const std::filesystem::path& folder, const ChatFile& file);

}  // namespace w4q::chat
