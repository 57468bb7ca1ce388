#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <new>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "text/regex_syntax.h"
#include "text/utf8.h"

namespace w4q::text {
namespace {

/// Real patterns have up to some 6,000 bytes (long lists of letters).
constexpr size_t max_pattern_bytes = 60'000;
/// Backtracking steps from one starting place: a run of white space costs a few for each of its characters.
constexpr size_t steps_per_byte = 10;
constexpr size_t steps_at_least = 1'000'000;
constexpr uint32_t max_heap_kib = 256 * 1024;
constexpr size_t jit_stack_bytes = 8 * 1024 * 1024;
/// Starting places tried before the first look at the budget. The windows grow, because PCRE2 may look through all of
/// the text for a byte that a match must begin with.
constexpr size_t first_window = 8;

template <auto free_function>
struct Free {
  template <class T>
  void operator()(T* pointer) const noexcept {
    free_function(pointer);
  }
};
using CodePointer = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;

/// PCRE2's working memory, one per thread: only the whole match is asked for, so that it fits every pattern.
struct MatchMemory {
  std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>> context{pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>> data{pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_jit_stack, Free<pcre2_jit_stack_free>> stack{
      pcre2_jit_stack_create(32 * 1024, jit_stack_bytes, nullptr)};

  MatchMemory() {
    if (!context || !data) throw std::bad_alloc();
    pcre2_set_heap_limit(context.get(), max_heap_kib);
    if (stack) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

/// Looks for a match that begins in [from, last_start]; it is then the first pair of the memory's offsets.
int match(const pcre2_code* code, std::string_view text, size_t from, size_t last_start, MatchMemory& memory) {
  const auto steps = static_cast<uint32_t>(std::min<size_t>(UINT32_MAX, steps_at_least + steps_per_byte * text.size()));
  pcre2_set_match_limit(memory.context.get(), steps);
  pcre2_set_depth_limit(memory.context.get(), steps);
  pcre2_set_offset_limit(memory.context.get(), last_start);
  const auto run = [&](uint32_t options) {
    return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, options | PCRE2_NO_UTF_CHECK,
                       memory.data.get(), memory.context.get());
  };
  const int found = run(0);
  return found == PCRE2_ERROR_JIT_STACKLIMIT ? run(PCRE2_NO_JIT) : found;
}

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

CodePointer compile(const std::string& pattern, int& error) {
  const std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>> context{
      pcre2_compile_context_create(nullptr)};
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  PCRE2_SIZE offset = 0;
  CodePointer code{
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT | PCRE2_NEVER_BACKSLASH_C, &error,
                    &offset, context.get())};
  // Without it (no memory that may be executed, another processor) the interpreter does the same, slower.
  if (code) pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

}  // namespace

struct Regex::Code {
  CodePointer get;
  std::string place;
  std::string pattern;  ///< the beginning, for messages

  Error too_costly(std::string_view why) const {
    return Error(ErrorCode::unsupported, concat(place, ": the regular expression is too costly on this text"))
        .detail(concat("pattern: ", pattern))
        .detail(why);
  }
};

Regex::Regex(std::string_view pattern, std::string_view place) {
  if (pattern.size() > max_pattern_bytes) {
    throw Error(ErrorCode::unsupported, concat(place, ": a regular expression of ", pattern.size(), " bytes"))
        .detail(concat("at most ", max_pattern_bytes, " bytes are read"));
  }
  int error = 0;
  auto code = std::make_shared<Code>();
  code->place = place;
  code->pattern = printable(pattern.substr(0, 80));
  code->get = compile(translate_regex(pattern, place), error);
  if (!code->get) {
    throw Error(ErrorCode::unsupported, concat(place, ": regular expression not understood: ", pcre2_message(error)))
        .detail(concat("pattern: ", code->pattern));
  }
  code_ = std::move(code);
}

std::optional<TextRange> Regex::search(std::string_view text, size_t from, WorkBudget& budget) const {
  thread_local MatchMemory memory;
  for (size_t window = first_window;; window *= 2) {
    if (budget.time_is_over()) throw code_->too_costly("it needs too much time");
    const size_t last_start = std::min(text.size(), from + window);
    const int found = match(code_->get.get(), text, from, last_start, memory);
    if (found >= 0) {
      const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(memory.data.get());
      return TextRange{ends[0], ends[1]};
    }
    if (found != PCRE2_ERROR_NOMATCH) throw code_->too_costly(pcre2_message(found));
    if (last_start == text.size()) return std::nullopt;
    from = last_start + 1;
    while (from < text.size() && utf8_continues(text[from])) ++from;
  }
}

}  // namespace w4q::text
