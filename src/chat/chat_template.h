// The chat template of a model's tokenizer: how it writes a conversation as one text.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "chat/conversations.h"
#include "chat/jinja/template.h"

namespace w4q::chat {

class ChatTemplate {
 public:
  /// That of `folder`: chat_template.jinja, else the key chat_template of tokenizer_config.json, else that of
  /// chat_template.json; and the special tokens of tokenizer_config.json and special_tokens_map.json. Throws bad_file
  /// when there is none or it is damaged, unsupported when it uses what is not here.
  static ChatTemplate open(const std::filesystem::path& folder);

  /// The conversation as transformers' apply_chat_template writes it, without a prompt for an answer. `date` as
  /// jinja::Template::render. Contents that are lists of parts become one text, the parts one a line, where the template
  /// would print the list itself. Throws as that does.
  std::string render(const Conversation& conversation, const std::string& date) const;

 private:
  void add(const io::Json& value, const std::string& source);
  void add_tokens(const std::filesystem::path& file);
  const jinja::Template& choose(const Conversation& conversation) const;
  bool reads_parts(const jinja::Template& chosen, const std::string& date) const;
  std::string run(const jinja::Template& chosen, const io::Json& messages, const io::Json& more,
                  const std::string& date) const;

  std::string folder_;
  std::map<std::string, jinja::Template, std::less<>> templates_;  ///< by name: "default", "tool_use" …
  io::Json tokens_ = io::Json::object();                           ///< bos_token, eos_token …: texts
};

}  // namespace w4q::chat
