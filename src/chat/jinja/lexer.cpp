#include "chat/jinja/lexer.h"

#include <algorithm>
#include <optional>

#include "chat/jinja/expression_lexer.h"
#include "chat/jinja/failure.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

using Type = Token::Type;

/// With line feeds alone, and without one at the end.
std::string with_line_feeds(std::string_view source) {
  std::string result;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      result += '\n';
      if (source.substr(i + 1, 1) == "\n") ++i;
    } else {
      result += source[i];
    }
  }
  if (result.ends_with('\n')) result.pop_back();
  return result;
}

bool all_space(std::string_view text) { return std::ranges::all_of(code_points(text), is_space); }

/// Where a tag begins: "{{", "{%" or "{#".
size_t find_tag(std::string_view source, size_t at) {
  for (; (at = source.find('{', at)) != std::string_view::npos; ++at) {
    if (at + 1 < source.size() && std::string_view("{%#").find(source[at + 1]) != std::string_view::npos) return at;
  }
  return std::string_view::npos;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)), expressions_(source_) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = find_tag(source_, at_);
      if (tag == std::string_view::npos) {
        data(at_, source_.size(), 0, true);
        at_ = source_.size();
      } else {
        step(tag);
      }
    }
    tokens_.push_back({Type::end, "", line_});
    return std::move(tokens_);
  }

 private:
  /// The text up to a tag at `tag`, and the tag.
  void step(size_t tag) {
    const char kind = source_[tag + 1];
    const std::string_view rest = std::string_view(source_).substr(tag + 2);
    const char sign = rest.starts_with('-') || rest.starts_with('+') ? rest.front() : 0;
    data(at_, tag, sign, kind == '{');
    count_lines(at_, tag);
    at_ = tag + 2 + (sign == 0 ? 0 : 1);
    if (kind == '#') {
      comment();
    } else if (kind == '{') {
      expression(Type::variable_begin, Type::variable_end);
    } else if (const auto end = word("raw", at_)) {
      raw(*end);
    } else {
      expression(Type::block_begin, Type::block_end);
    }
    line_starting_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  void count_lines(size_t begin, size_t end) {
    line_ += static_cast<int>(std::ranges::count(std::string_view(source_).substr(begin, end - begin), '\n'));
  }

  /// Text before a tag with that sign; `keeps`: no white space is stripped before the tag by itself.
  void data(size_t begin, size_t end, char sign, bool keeps) {
    std::string_view text = std::string_view(source_).substr(begin, end - begin);
    std::string kept;
    if (sign == '-') {
      kept = strip(text, std::nullopt, {.left = false, .right = true});
    } else {
      const size_t line_feed = text.rfind('\n');
      const size_t line = line_feed == std::string_view::npos ? 0 : line_feed + 1;
      const bool strips = sign != '+' && !keeps && (line > 0 || line_starting_) && all_space(text.substr(line));
      kept = strips ? text.substr(0, line) : text;
    }
    if (!kept.empty()) tokens_.push_back({Type::data, std::move(kept), line_});
  }

  /// Behind the word of a tag whose inside begins at `at`, when it is that word: "raw", "endraw".
  std::optional<size_t> word(std::string_view what, size_t at) const {
    at = expressions_.skip_space(at);
    if (std::string_view(source_).substr(at, what.size()) != what) return std::nullopt;
    const size_t end = expressions_.skip_space(at + what.size());
    const std::string_view rest = std::string_view(source_).substr(end);
    return rest.starts_with("%}") || rest.starts_with("-%}") || rest.starts_with("+%}") ? std::optional(end)
                                                                                        : std::nullopt;
  }

  /// Behind the end of a tag at `at`, which is "-%}", "+%}" or "%}"; what it takes of the text behind it too.
  size_t tag_end(size_t at, bool trims) const {
    const std::string_view rest = std::string_view(source_).substr(at);
    if (rest.starts_with('-')) return expressions_.skip_space(at + 3);
    at += rest.starts_with('+') ? 3 : 2;
    return trims && !rest.starts_with('+') && at < source_.size() && source_[at] == '\n' ? at + 1 : at;
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) throw syntax_failure(line_, "a comment {# has no end").remedy("add #}");
    const bool has_sign = end > at_ && (source_[end - 1] == '-' || source_[end - 1] == '+');
    const size_t next = tag_end(has_sign ? end - 1 : end, true);
    count_lines(at_, next);
    at_ = next;
  }

  void raw(size_t end) {
    const size_t begin = tag_end(end, false);
    count_lines(at_, begin);
    at_ = begin;
    line_starting_ = source_[begin - 1] == '\n';
    for (size_t tag = source_.find("{%", begin); tag != std::string::npos; tag = source_.find("{%", tag + 2)) {
      const char next = tag + 2 < source_.size() ? source_[tag + 2] : 0;
      const char sign = next == '-' || next == '+' ? next : 0;
      const auto close = word("endraw", tag + 2 + (sign == 0 ? 0 : 1));
      if (!close) continue;
      data(begin, tag, sign, false);
      const size_t behind = tag_end(*close, true);
      count_lines(at_, behind);
      at_ = behind;
      return;
    }
    throw syntax_failure(line_, "{% raw %} has no end").remedy("add {% endraw %}");
  }

  void expression(Type begin, Type end) {
    tokens_.push_back({begin, "", line_});
    at_ = expressions_.run(at_, end == Type::block_end, line_, tokens_);
    tokens_.push_back({end, "", line_});
    const size_t next = end == Type::block_end ? tag_end(at_, true)
                        : source_[at_] == '-'  ? expressions_.skip_space(at_ + 3)
                                               : at_ + 2;
    count_lines(at_, next);
    at_ = next;
  }

  const std::string source_;
  const ExpressionLexer expressions_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(with_line_feeds(source)).run(); }

}  // namespace w4q::jinja
