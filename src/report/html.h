// HTML in strings: what comes from a file is escaped where it enters.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"

namespace w4q::report {

/// `text` as it may stand between tags and in quoted attributes; control characters and what is no UTF-8 as \xNN.
std::string escape(std::string_view text);

/// The same, shortened where it is long: names of hostile files may have megabytes.
std::string name_of(const std::string& text);
/// Of a string; "–" for null, and what it is in JSON for anything else.
std::string name_of(const io::Json& value);
/// The string that `value` is; empty for anything else.
std::string text_of(const io::Json& value);
std::string code(const std::string& html);

/// `digits` significant ones, "–" for null, within <data value="…">, which has all of them: a page can be held against
/// its report.
std::string number(const io::Json& value, int digits = 5);
/// The same as "1.23 GB".
std::string bytes(const io::Json& value);
/// The same as "75.00 %".
std::string percent(const io::Json& share);

/// A value that may not be there: null.
const io::Json& at(const io::Json& object, std::string_view key);
/// The number of `value`; NaN where it has none.
double real(const io::Json& value);

/// How many kinds of tensors, parts of a step and rows like them are shown.
inline constexpr size_t kinds_shown = 40;

using Rows = std::vector<std::vector<std::string>>;
/// A table that scrolls by itself where the screen is narrow. Cells are HTML.
std::string table(const std::vector<std::string>& head, const Rows& rows);
/// A heading and what stands below it; nothing where there is nothing.
std::string section(std::string_view title, const std::string& content);
/// A smaller heading; nothing for the only part of a section, which has no name.
std::string subtitle(const std::string& name);
/// A line below a plot or a table.
std::string remark(const std::string& html);

}  // namespace w4q::report
