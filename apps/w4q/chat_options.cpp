#include "chat_options.h"

namespace w4q::app {

CLI::Option* add_chat(CLI::App& command, chat::ChatFile& file, const std::vector<CLI::Option*>& others) {
  auto* chat = command
                   .add_option("--chat", file.path,
                               "Conversations, one JSON object a line, written by the model's own chat template")
                   ->type_name("FILE");
  for (CLI::Option* other : others) chat->excludes(other);
  command.add_option("--chat-date", file.date, "What templates take for today, so that it does not depend on the day")
      ->needs(chat)
      ->type_name("DATE")
      ->capture_default_str();
  return chat;
}

}  // namespace w4q::app
