// Regular expressions in tokenizer.json are written for Oniguruma (Ruby's dialect). PCRE2 reads a neighbouring one:
// some characters mean something else, and its \s, \d, \w and \b stand for other sets of characters. This is the
// translation.
#pragma once

#include <string>
#include <string_view>

namespace w4q::text {

/// `pattern` (valid UTF-8) in PCRE2's dialect, to be compiled with UTF, UCP and MULTILINE, newline = line feed.
///
/// What changes: \s \d \w \h \v \b and the POSIX brackets become Unicode properties; scripts mean the script property,
/// not its extensions; {n,m}+ and {n}? repeat a repetition; (?m) makes the dot match a line feed; an option in the
/// middle of a group holds to the group's end across |; nested classes and && become alternatives and lookaheads.
/// Throws Error unsupported, beginning with `place`, for syntax that has no counterpart here.
std::string translate_regex(std::string_view pattern, std::string_view place);

}  // namespace w4q::text
