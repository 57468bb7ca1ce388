// What goes wrong inside a template: whoever renders it adds the file and the line.
#pragma once

#include <string>

#include "chat/jinja/value.h"
#include "core/error.h"

namespace w4q::jinja {

struct Failure {
  Failure(ErrorCode code_, std::string what_) : code(code_), what(std::move(what_)) {}
  Failure&& remedy(std::string text) && {
    hint = std::move(text);
    return std::move(*this);
  }

  ErrorCode code;
  std::string what;
  std::string hint = {};
  int line = 0;  ///< of the template, 0: whoever runs it knows
};

/// Something was done with an undefined value.
inline Failure undefined_failure(const Value& value) {
  return Failure(ErrorCode::bad_file, *value.as<Undefined>().what)
      .remedy("the conversation lacks something that the template asks for, or the template is damaged");
}

/// The template itself is damaged.
inline Failure syntax_failure(int line, std::string what) {
  Failure failure(ErrorCode::bad_file, std::move(what));
  failure.line = line;
  failure.hint = "Jinja2 would refuse the template too; take the one of the model's publisher";
  return failure;
}

/// The template uses a part of Jinja2 that is not here.
inline Failure unsupported_failure(int line, std::string what) {
  Failure failure(ErrorCode::unsupported, std::move(what));
  failure.line = line;
  failure.hint = "docs/chat.md lists what templates may use";
  return failure;
}

/// Python's TypeError, ValueError …
inline Failure type_failure(std::string what) {
  return Failure(ErrorCode::bad_file, std::move(what))
      .remedy("the template expects another kind of value in the conversation, or is damaged");
}

}  // namespace w4q::jinja
