// Regular expressions with the meaning that Oniguruma gives them, run by PCRE2, safe against hostile patterns.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

#include "text/work_budget.h"

namespace w4q::text {

/// Bytes [begin, end) of a text.
struct TextRange {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const noexcept { return end - begin; }
  bool operator==(const TextRange&) const = default;
};

class Regex {
 public:
  /// Compiles `pattern`, in Oniguruma's dialect. Throws unsupported, beginning with `place`, when it cannot.
  Regex(std::string_view pattern, std::string_view place);

  /// The first match that begins at `from` or later, which is a character boundary of `text`, valid UTF-8. What stands
  /// before `from` can be seen by lookbehind. Throws unsupported when the pattern needs too much time or memory.
  /// Thread-safe.
  std::optional<TextRange> search(std::string_view text, size_t from, WorkBudget& budget) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace w4q::text
