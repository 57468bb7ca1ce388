#include "text/regex_syntax.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "text/regex_sets.h"
#include "text/utf8.h"

namespace w4q::text {
namespace {

constexpr size_t none = std::string::npos;
constexpr int max_class_depth = 20;

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view place) : in_(pattern), place_(place) {}

  std::string run() {
    while (at_ < in_.size()) step();
    if (groups_.size() != 1) fail("a group is not closed");
    close_options();
    return std::move(out_);
  }

 private:
  /// An open group: where its text begins in out_, and how many option groups were opened inside it.
  struct Group {
    size_t begin = 0;
    int options = 0;
  };

  [[noreturn]] void fail(std::string_view what) const {
    throw Error(ErrorCode::unsupported, concat(place_, ": regular expression not understood: ", what))
        .detail(concat("pattern: ", printable(in_.substr(0, 80)), ", byte ", at_));
  }

  bool ahead(std::string_view text) const { return in_.substr(at_).starts_with(text); }
  bool accept(std::string_view text) {
    if (!ahead(text)) return false;
    at_ += text.size();
    return true;
  }
  char next() {
    if (at_ >= in_.size()) fail("it ends too early");
    return in_[at_++];
  }
  /// Everything up to `end`, which is taken too.
  std::string_view until(std::string_view end) {
    const size_t found = in_.find(end, at_);
    if (found == none) fail(concat("\"", end, "\" is missing"));
    const std::string_view text = in_.substr(at_, found - at_);
    at_ = found + end.size();
    return text;
  }

  void atom(std::string_view text) {
    atom_ = out_.size();
    out_ += text;
  }

  void step() {
    switch (in_[at_]) {
      case '\\':
        ++at_;
        return escape();
      case '[':
        ++at_;
        return atom(bracket(0));
      case '(':
        ++at_;
        return open();
      case ')':
        ++at_;
        return close();
      case '{':
        return interval();
      case '*':
      case '+':
      case '?':
        out_ += in_[at_++];
        return;
      case '|':
        ++at_;
        out_ += '|';
        atom_ = none;
        return;
      default:
        break;
    }
    const size_t size = utf8_size(in_[at_]);
    atom(in_.substr(at_, size));
    at_ += size;
  }

  void open() {
    if (ahead("*")) fail("(* is not supported");
    if (accept("?#")) {
      until(")");
      return;
    }
    const size_t begin = out_.size();
    out_ += '(';
    atom_ = none;
    if (ahead("?")) {
      constexpr std::array<std::string_view, 8> heads = {"?:", "?=", "?!", "?>", "?<=", "?<!", "?<", "?'"};
      const auto head = std::find_if(heads.begin(), heads.end(), [&](auto text) { return ahead(text); });
      if (head == heads.end()) return options(begin);
      accept(*head);
      out_ += *head;
      if (*head == "?<") out_ += concat(until(">"), ">");
      if (*head == "?'") out_ += concat(until("'"), "'");
    }
    groups_.push_back({begin, 0});
  }

  /// (?im-im) or (?im-im: … ). The first form holds to the end of the group, in Oniguruma across | as well, so that it
  /// is written as a group of its own.
  void options(size_t begin) {
    ++at_;
    out_ += '?';
    char c = next();
    for (; c != ':' && c != ')'; c = next()) {
      if (c != 'i' && c != 'm' && c != '-') fail("an option other than i and m, or an unknown kind of group");
      out_ += c == 'm' ? 's' : c;
    }
    out_ += ':';
    if (c == ':') {
      groups_.push_back({begin, 0});
    } else {
      ++groups_.back().options;
    }
  }

  void close_options() {
    out_.append(static_cast<size_t>(groups_.back().options), ')');
    groups_.back().options = 0;
  }

  void close() {
    if (groups_.size() == 1) fail("a group is closed that is not open");
    close_options();
    out_ += ')';
    atom_ = groups_.back().begin;
    groups_.pop_back();
  }

  std::string_view digits() {
    const size_t begin = at_;
    while (at_ < in_.size() && in_[at_] >= '0' && in_[at_] <= '9') ++at_;
    return in_.substr(begin, at_ - begin);
  }

  /// {n}, {n,}, {,m} or {n,m}; anything else in braces is text.
  void interval() {
    const size_t begin = at_++;
    const std::string_view low = digits();
    const bool comma = accept(",");
    const std::string_view high = comma ? digits() : low;
    if (!accept("}") || (low.empty() && high.empty())) {
      at_ = begin + 1;
      return atom("\\{");
    }
    out_ += concat("{", low.empty() ? "0" : low, comma ? "," : "", comma ? high : "", "}");
    // {n,m}+ is possessive and {n}? lazy for PCRE2; Oniguruma repeats the repetition.
    if (atom_ != none && (ahead("+") || (ahead("?") && !comma))) {
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
  }

  void escape() {
    const char c = next();
    constexpr std::string_view same = "AzZKRNntrfaek123456789g0x";
    if (const auto set = set_escape(c)) {
      return atom(
          class_of(set->body == regex_sets::word ? regex_sets::lone_word : std::string_view(set->body), set->negated));
    }
    if (c == 'b' || c == 'B') return boundary(c == 'B');
    if (c == 'v') return atom("\\x0b");
    if (c == 'u') return atom(code_unit());
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) return quoted(c);
    if (same.find(c) == none) fail(concat("the escape \\", c));
    if (c == 'x') return atom(hexadecimal());
    atom(concat("\\", c));
  }

  void quoted(char c) {
    const size_t size = utf8_size(c);
    atom(concat(size == 1 ? "\\" : "", in_.substr(at_ - 1, size)));
    at_ += size - 1;
  }

  struct EscapedSet {
    std::string body;
    bool negated;
  };

  /// \d \s \w \h \p{…} and their negations.
  std::optional<EscapedSet> set_escape(char c) {
    const bool negated = c >= 'A' && c <= 'Z';
    switch (c) {
      case 'd':
      case 'D':
        return EscapedSet{std::string(regex_sets::digit), negated};
      case 's':
      case 'S':
        return EscapedSet{std::string(regex_sets::space), negated};
      case 'w':
      case 'W':
        return EscapedSet{std::string(regex_sets::word), negated};
      case 'h':
      case 'H':
        return EscapedSet{std::string(regex_sets::hex), negated};
      case 'p':
      case 'P':
        return property(negated);
      default:
        return std::nullopt;
    }
  }

  EscapedSet property(bool negated) {
    if (!accept("{")) fail("\\p without braces");
    const bool inverted = accept("^");
    const std::string_view name = until("}");
    const auto allowed = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == ' ' || c == '-';
    };
    if (name.empty() || !std::all_of(name.begin(), name.end(), allowed)) fail("the name of a property");
    return {property_body(name), negated != inverted};
  }

  void boundary(bool negated) {
    const std::string w = class_of(regex_sets::lone_word, false);
    atom(negated ? concat("(?:(?<=", w, ")(?=", w, ")|(?<!", w, ")(?!", w, "))")
                 : concat("(?:(?<=", w, ")(?!", w, ")|(?<!", w, ")(?=", w, "))"));
  }

  /// \uHHHH
  std::string code_unit() {
    std::string digits_of_code;
    for (int i = 0; i < 4; ++i) digits_of_code += hex_digit();
    return concat("\\x{", digits_of_code, "}");
  }

  char hex_digit() {
    const char c = next();
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) fail("a hexadecimal digit is missing");
    return c;
  }

  /// \x{H…} or \xHH of an ASCII character (above, Oniguruma means a byte).
  std::string hexadecimal() {
    if (accept("{")) return concat("\\x{", until("}"), "}");
    const char high = hex_digit();
    const char low = hex_digit();
    if (high >= '8') fail("\\x of a byte that is not ASCII");
    return concat("\\x", high, low);
  }

  /// A class, after its opening bracket: an expression that matches one character.
  std::string bracket(int depth) {
    if (depth > max_class_depth) fail("classes are nested too deeply");
    const bool negated = accept("^");
    std::vector<std::string> operands;
    ClassUnion set;
    for (bool first = true; first || !ahead("]"); first = false) {
      if (accept("&&")) {
        operands.push_back(set.text(false));
        set = {};
      } else {
        class_member(set, depth);
      }
    }
    ++at_;
    if (operands.empty()) return set.text(negated);
    std::string both = negated ? "(?:(?!" : "(?:";
    for (const auto& operand : operands) both += concat("(?=", operand, ")");
    both += set.text(false);
    return both + (negated ? ")(?s:.))" : ")");
  }

  void class_member(ClassUnion& set, int depth) {
    if (accept("[:")) {
      const bool negated = accept("^");
      const std::string_view name = until(":]");
      const auto body = posix_body(name);
      if (!body) fail(concat("the set [:", printable(name), ":]"));
      return set.add(*body, negated);
    }
    if (accept("[")) {
      set.add_other(bracket(depth + 1));
      return;
    }
    if (accept("\\")) return class_escape(set);
    const size_t size = at_ < in_.size() ? utf8_size(in_[at_]) : 1;
    const char c = next();
    const std::string_view text = in_.substr(at_ - 1, size);
    set.add_character(c == ']' || c == '^' ? concat("\\", text) : text);
    at_ += size - 1;
  }

  void class_escape(ClassUnion& set) {
    const char c = next();
    constexpr std::string_view same = "ntrfaeb01234567";
    if (const auto named = set_escape(c)) return set.add(named->body, named->negated);
    if (c == 'v') return set.add_character("\\x0b");
    if (c == 'u') return set.add_character(code_unit());
    if (c == 'x') return set.add_character(hexadecimal());
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 && same.find(c) == none) {
      fail(concat("the escape \\", c, " in a class"));
    }
    const size_t size = utf8_size(c);
    set.add_character(concat(size == 1 ? "\\" : "", in_.substr(at_ - 1, size)));
    at_ += size - 1;
  }

  std::string_view in_;
  std::string_view place_;
  size_t at_ = 0;
  std::string out_;
  size_t atom_ = none;  ///< where the last thing that can be repeated begins in out_
  std::vector<Group> groups_ = {{}};
};

}  // namespace

std::string translate_regex(std::string_view pattern, std::string_view place) {
  return Translator(pattern, place).run();
}

}  // namespace w4q::text
