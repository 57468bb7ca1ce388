// Reports of w4q as one HTML page: made of the JSON that commands print, and nothing else. It needs neither network nor
// scripts, is readable in light and dark and on a phone, and carries that JSON with it.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::report {

/// Whole pages are not larger: what is long in the JSON is left out of the copy that the page carries until it fits, and
/// the page says so.
inline constexpr size_t most_page_bytes = 1'000'000;

/// `report`: with "schema", "verify" or "compare", and whatever docs/schema lets it have or lack. Strings may be hostile:
/// they are escaped, and are shortened where they are long. Throws bad_argument for another schema.
std::string html_page(const io::Json& report);

/// A report that was read from a file.
struct NamedReport {
  std::string name;  ///< stands beside its figures
  io::Json json;
};
/// The same of one or more reports on one page: any number of verify, side by side, of bench, and of quantize with
/// --target-bpw or --target-size; or one of compare. Their JSON may be anything. Throws bad_argument for another schema,
/// compare beside others, or quantize without a choice of bits; bad_file for JSON that the schema it names does not allow.
std::string joint_page(const std::vector<NamedReport>& reports);

}  // namespace w4q::report
