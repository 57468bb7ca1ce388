#include "chat/chat_template.h"

#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "io/files.h"

namespace w4q::chat {
namespace {

namespace fs = std::filesystem;
using io::Json;

/// The text of a token in tokenizer_config.json: a text, or an object with one.
const Json* token_text(const Json& value) {
  if (value.is_string()) return &value;
  if (!value.is_object()) return nullptr;
  const auto content = value.find("content");
  return content != value.end() && content->is_string() ? &*content : nullptr;
}

/// Contents that are lists of parts as one text.
Json joined(const Json& messages) {
  Json result = messages;
  for (Json& message : result) {
    const auto content = message.find("content");
    if (content == message.end() || !content->is_array()) continue;
    std::vector<std::string> texts;
    for (const Json& part : *content) texts.push_back(part.at("text").get<std::string>());
    *content = join(texts, "\n");
  }
  return result;
}

}  // namespace

ChatTemplate ChatTemplate::open(const fs::path& folder) {
  ChatTemplate result;
  result.folder_ = folder.string();
  const fs::path jinja = folder / "chat_template.jinja";
  if (fs::exists(jinja)) {
    result.add(io::read_model_file(jinja, io::max_config_bytes), jinja.string());
  }
  for (const char* name : {"tokenizer_config.json", "chat_template.json"}) {
    const fs::path file = folder / name;
    if (!result.templates_.empty() || !fs::exists(file)) continue;
    const Json json = io::read_json(file);
    const auto found = json.is_object() ? json.find("chat_template") : json.end();
    if (json.is_object() && found != json.end() && !found->is_null())
      result.add(*found, file.string() + ": chat_template");
  }
  if (result.templates_.empty()) {
    throw Error(ErrorCode::bad_file, result.folder_ + ": there is no chat template")
        .detail("neither chat_template.jinja nor the key chat_template of tokenizer_config.json or chat_template.json")
        .hint("put the publisher's chat_template.jinja there; base models have none and take plain text");
  }
  result.add_tokens(folder / "tokenizer_config.json");
  result.add_tokens(folder / "special_tokens_map.json");
  return result;
}

/// One template, or a list of {name, template}.
void ChatTemplate::add(const Json& value, const std::string& source) {
  if (value.is_string()) {
    templates_.emplace("default", jinja::Template::parse(value.get_ref<const std::string&>(), source));
    return;
  }
  const auto bad = [&] {
    return Error(ErrorCode::bad_file, source + ": expected a text, or a list of objects with 'name' and 'template'")
        .hint("the file is damaged: take the publisher's");
  };
  if (!value.is_array()) throw bad();
  for (const Json& row : value) {
    const auto is_text = [&](const char* key) { return row.contains(key) && row.at(key).is_string(); };
    if (!row.is_object() || !is_text("name") || !is_text("template")) throw bad();
    const std::string name = row.at("name").get<std::string>();
    templates_.emplace(name, jinja::Template::parse(row.at("template").get_ref<const std::string&>(),
                                                    concat(source, ": '", printable(name), "'")));
  }
}

/// Members that end in _token, where they are not known yet.
void ChatTemplate::add_tokens(const fs::path& file) {
  if (!fs::exists(file)) return;
  const Json json = io::read_json(file);
  if (!json.is_object()) return;
  for (const auto& [key, value] : json.items()) {
    const Json* text = key.ends_with("_token") ? token_text(value) : nullptr;
    if (text != nullptr && !tokens_.contains(key)) tokens_[key] = *text;
  }
}

/// As transformers: the one for tools where there are some, else the default.
const jinja::Template& ChatTemplate::choose(const Conversation& conversation) const {
  const auto tools = templates_.find("tool_use");
  if (conversation.variables.contains("tools") && tools != templates_.end()) return tools->second;
  const auto found = templates_.find("default");
  if (found != templates_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, chosen] : templates_) names.push_back(printable(name));
  throw Error(ErrorCode::unsupported, folder_ + ": no chat template is called 'default'")
      .detail(concat("there are ", join(names)))
      .hint("put the one that is meant there as chat_template.jinja");
}

std::string ChatTemplate::run(const jinja::Template& chosen, const Json& messages, const Json& more,
                              const std::string& date) const {
  Json variables = tokens_;
  variables["tools"] = nullptr;
  variables["documents"] = nullptr;
  variables["add_generation_prompt"] = false;
  variables.update(more);
  variables["messages"] = messages;
  return chosen.render(variables, date);
}

/// Whether a text in a part arrives without what Python prints around it.
bool ChatTemplate::reads_parts(const jinja::Template& chosen, const std::string& date) const {
  const Json content = Json::array({{{"type", "text"}, {"text", "w4q-part"}}});
  try {
    const std::string text = run(chosen, Json::array({{{"role", "user"}, {"content", content}}}), Json::object(), date);
    return text.find("w4q-part") != std::string::npos && text.find("'w4q-part'") == std::string::npos &&
           text.find("\"w4q-part\"") == std::string::npos;
  } catch (const Error&) {
    return false;
  }
}

std::string ChatTemplate::render(const Conversation& conversation, const std::string& date) const {
  const jinja::Template& chosen = choose(conversation);
  const bool joins = conversation.has_parts && !reads_parts(chosen, date);
  return run(chosen, joins ? joined(conversation.messages) : conversation.messages, conversation.variables, date);
}

}  // namespace w4q::chat
