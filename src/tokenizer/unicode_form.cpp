#include "tokenizer/unicode_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "text/utf8.h"

namespace w4q::tokenizer {
namespace {

using CodePoints = std::vector<utf8proc_int32_t>;

/// The longest decomposition of a character has 18 code points (U+FDFA).
constexpr size_t max_decomposition = 32;

int options_of(UnicodeForm form) {
  switch (form) {
    case UnicodeForm::nfc:
      return UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    case UnicodeForm::nfd:
      return UTF8PROC_STABLE | UTF8PROC_DECOMPOSE;
    case UnicodeForm::nfkc:
      return UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT;
    case UnicodeForm::nfkd:
      return UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT;
  }
  return 0;
}

int combining_class(utf8proc_int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

void decompose(std::string_view text, int options, CodePoints& out) {
  out.clear();
  std::array<utf8proc_int32_t, max_decomposition> buffer{};
  while (!text.empty()) {
    const text::Utf8Step step = text::utf8_step(text);
    text.remove_prefix(step.size);
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), buffer.data(),
                                               buffer.size(), static_cast<utf8proc_option_t>(options), &boundary);
    ensure(count >= 0 && static_cast<size_t>(count) <= buffer.size(), "a character decomposes into too many");
    out.insert(out.end(), buffer.begin(), buffer.begin() + count);
  }
}

/// Sorts every run of combining marks by class. (utf8proc's own sort takes quadratic time on a long run.)
void order_marks(CodePoints& text) {
  const auto is_starter = [](utf8proc_int32_t c) { return combining_class(c) == 0; };
  for (auto run = text.begin(); run != text.end();) {
    run = std::find_if_not(run, text.end(), is_starter);
    const auto end = std::find_if(run, text.end(), is_starter);
    std::stable_sort(run, end, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    run = end;
  }
}

/// Composes characters. utf8proc joins U+11A7 to a Hangul syllable before it and loses it, though that code point is
/// not one of the trailing consonants, which follow it; nothing composes across it, so each part begins with it.
CodePoints::iterator compose(CodePoints::iterator begin, CodePoints::iterator end, int options) {
  auto out = begin;
  while (begin != end) {
    const auto next = std::find(begin + 1, end, 0x11A7);
    const auto count = utf8proc_normalize_utf32(&*begin, next - begin, static_cast<utf8proc_option_t>(options));
    ensure(count >= 0, "composing characters failed");
    out = std::copy(begin, begin + count, out);
    begin = next;
  }
  return out;
}

void append_normalized(std::string_view text, int options, CodePoints& memory, std::string& out) {
  decompose(text, options, memory);
  order_marks(memory);
  if ((options & UTF8PROC_COMPOSE) != 0) memory.erase(compose(memory.begin(), memory.end(), options), memory.end());
  for (const auto code_point : memory) text::utf8_append(out, static_cast<char32_t>(code_point));
}

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

}  // namespace

std::string unicode_normalized(std::string_view text, UnicodeForm form) {
  const int options = options_of(form);
  std::string result;
  result.reserve(text.size());
  CodePoints memory;
  size_t done = 0;
  while (done < text.size()) {
    // Characters of ASCII stay as they are, and nothing before one composes with it: only the stretches from the one
    // before a foreign character to the next are worked on.
    const auto rest = text.begin() + static_cast<std::ptrdiff_t>(done);
    const auto foreign = static_cast<size_t>(std::find_if_not(rest, text.end(), is_ascii) - text.begin());
    const size_t begin = foreign > done && foreign < text.size() ? foreign - 1 : foreign;
    result.append(text.substr(done, begin - done));
    const auto next = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(foreign), text.end(), is_ascii);
    done = static_cast<size_t>(next - text.begin());
    append_normalized(text.substr(begin, done - begin), options, memory, result);
  }
  return result;
}

std::string unicode_lowercase(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const text::Utf8Step step = text::utf8_step(text);
    if (step.code_point == 0x130) {
      result += "i\xCC\x87";  // I with dot above, the one character whose lower case is two
    } else {
      text::utf8_append(result,
                        static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(step.code_point))));
    }
    text.remove_prefix(step.size);
  }
  return result;
}

}  // namespace w4q::tokenizer
