// Text in markup.
#pragma once

#include <string>
#include <string_view>

namespace w4q {

/// `text` with & < > ' " as the entities that Jinja2 writes: what may stand between tags and in quoted attributes.
std::string with_entities(std::string_view text);

}  // namespace w4q
