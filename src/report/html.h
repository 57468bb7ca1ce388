// HTML in strings: what comes from a file is escaped where it enters.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"

namespace w4q::report {

/// `text` as it may stand between tags and in quoted attributes; control characters and what is no UTF-8 as \xNN.
std::string escape(std::string_view text);

/// `digits` significant ones, "–" for null, within <data value="…">, which has all of them: a page can be held against
/// its report.
std::string number(const io::Json& value, int digits = 5);
/// The same as "1.23 GB".
std::string bytes(const io::Json& value);

/// A value that may not be there: null.
const io::Json& at(const io::Json& object, std::string_view key);
/// The number of `value`; NaN where it has none.
double real(const io::Json& value);

/// A table that scrolls by itself where the screen is narrow. Cells are HTML.
std::string table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows);
/// A heading and what stands below it; nothing where there is nothing.
std::string section(std::string_view title, const std::string& content);
/// A line below a plot or a table.
std::string remark(const std::string& html);

}  // namespace w4q::report
