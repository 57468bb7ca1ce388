// Chat templates: the part of Jinja2 that they use, as transformers sets it up (docs/chat.md).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "chat/jinja/runtime.h"
#include "chat/jinja/syntax.h"
#include "io/json.h"

namespace w4q::jinja {

class Template {
 public:
  /// `name` names it in messages. Throws bad_file with the line when it is damaged, unsupported when it uses what is not
  /// here.
  static Template parse(std::string_view source, std::string name);

  /// What it prints of an object of variables. `date`: "2025-01-31", of strftime_now. Throws bad_file with the line where
  /// Jinja2 would raise an exception, unsupported where it takes more than the limits.
  std::string render(const io::Json& variables, const std::string& date, const Limits& limits = {}) const;

 private:
  Template() = default;

  std::string name_;
  Statements statements_;
};

}  // namespace w4q::jinja
