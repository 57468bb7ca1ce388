// Operators, attributes and items, as Python and the sandbox of Jinja2 have them.
#pragma once

#include <memory>
#include <string_view>

#include "chat/jinja/runtime.h"

namespace w4q::jinja {

/// a op b for + - * / // % ** ~. Throws Failure as Python throws TypeError, ZeroDivisionError …, and when an integer
/// does not fit 64 bits.
Value binary(Runtime& runtime, std::string_view op, const Value& a, const Value& b);
/// +a, -a.
Value unary(std::string_view op, const Value& a);
/// a op b for == != < <= > >= in, not in.
bool compare(std::string_view op, const Value& a, const Value& b);
/// a < b, for sorting.
bool less(const Value& a, const Value& b);
bool contains(const Value& container, const Value& item);

/// What a loop walks over; of an iterator the rest, which is then spent. Throws Failure for what cannot be walked.
std::shared_ptr<const Sequence> walk(Runtime& runtime, const Value& value);
/// len(value), which Python has not of everything.
int64_t length(const Value& value);

/// object.name and object[index]: a method, an item, or undefined.
Value attribute(const Value& object, const std::string& name);
Value item(Runtime& runtime, const Value& object, const Value& index);
/// object[start:stop:step], where null is missing.
Value slice(Runtime& runtime, const Value& object, const Value* start, const Value* stop, const Value* step);

/// The item or attribute at a path "a.b.0", as Jinja2's arguments named attribute are written.
Value value_at(Runtime& runtime, Value value, const Value& path);

/// text % arguments, for the conversions s r d i u f e g x c and %.
std::string percent_format(Runtime& runtime, std::string_view text, const Value& arguments);
/// text.format(…), for fields without attributes, conversions and specifications.
std::string brace_format(Runtime& runtime, std::string_view text, const Arguments& arguments);

}  // namespace w4q::jinja
