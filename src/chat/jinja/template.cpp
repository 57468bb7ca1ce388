#include "chat/jinja/template.h"

#include "chat/jinja/interpreter.h"
#include "chat/jinja/lexer.h"
#include "chat/jinja/parser.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

Error error_of(const Failure& failure, const std::string& name, int line) {
  Error error(failure.code, concat(name, ": line ", failure.line > 0 ? failure.line : line, ": ", failure.what));
  if (!failure.hint.empty()) error.hint(failure.hint);
  return error;
}

}  // namespace

Template Template::parse(std::string_view source, std::string name) {
  if (text::utf8_valid_prefix(source) != source.size()) throw Error(ErrorCode::bad_file, name + ": is not UTF-8");
  Template result;
  result.name_ = std::move(name);
  try {
    result.statements_ = Parser(tokenize(source)).run();
  } catch (const Failure& failure) {
    throw error_of(failure, result.name_, 1);
  }
  return result;
}

std::string Template::render(const io::Json& variables, const std::string& date, const Limits& limits) const {
  Interpreter interpreter(limits, date);
  try {
    std::vector<std::pair<std::string, Value>> values;
    for (const auto& [key, value] : variables.items()) values.emplace_back(key, from_json(value));
    return interpreter.run(statements_, std::move(values));
  } catch (const Failure& failure) {
    throw error_of(failure, name_, interpreter.line());
  }
}

}  // namespace w4q::jinja
