// A text that any model that knows English finds likely.
#pragma once

#include <string_view>

namespace w4q::verify::behaviour {

/// Some 1,000 characters of plain prose, a description and a conversation.
std::string_view plain_text();

}  // namespace w4q::verify::behaviour
