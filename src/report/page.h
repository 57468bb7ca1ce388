// The report of w4q verify or compare as one HTML page: made of the JSON that they print, and nothing else. It needs
// neither network nor scripts, is readable in light and dark and on a phone, and carries that JSON with it.
#pragma once

#include <string>

#include "io/json.h"

namespace w4q::report {

/// Whole pages are not larger: what is long in the JSON is left out of the copy that the page carries until it fits, and
/// the page says so.
inline constexpr size_t most_page_bytes = 1'000'000;

/// `report`: with "schema", "verify" or "compare", and whatever docs/schema lets it have or lack. Strings may be hostile:
/// they are escaped, and are shortened where they are long. Throws bad_argument for another schema.
std::string html_page(const io::Json& report);

}  // namespace w4q::report
