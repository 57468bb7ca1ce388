// The four Unicode normalization forms.
#pragma once

#include <string>
#include <string_view>

namespace w4q::tokenizer {

enum class UnicodeForm { nfc, nfd, nfkc, nfkd };

/// `text`, valid UTF-8, in the given form. Takes O(n log n) whatever the text.
std::string unicode_normalized(std::string_view text, UnicodeForm form);

/// `text`, valid UTF-8, with the full lower case mapping of each character by itself.
std::string unicode_lowercase(std::string_view text);

}  // namespace w4q::tokenizer
