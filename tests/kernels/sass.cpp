#include "kernels/sass.h"

#include <cxxabi.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <istream>
#include <memory>
#include <tuple>

namespace w4q::test::sass {
namespace {

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

/// The text between the first `open` and the `close` behind it.
std::optional<std::string_view> between(std::string_view text, std::string_view open, std::string_view close) {
  const size_t at = text.find(open);
  if (at == std::string_view::npos) return std::nullopt;
  const size_t begin = at + open.size();
  const size_t end = text.find(close, begin);
  if (end == std::string_view::npos) return std::nullopt;
  return text.substr(begin, end - begin);
}

std::optional<uint32_t> parse_number(std::string_view digits, int base) {
  uint32_t value = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (result.ec != std::errc{} || result.ptr != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

/// Takes the first word off `text`.
std::string_view take_word(std::string_view& text) {
  const size_t end = std::min(text.find(' '), text.size());
  const std::string_view word = text.substr(0, end);
  text = trimmed(text.substr(end));
  return word;
}

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> beginnings) {
  return std::ranges::any_of(beginnings, [&](std::string_view beginning) { return text.starts_with(beginning); });
}

/// What a way through the loop is worth; the greatest is the steady one.
using Worth = std::tuple<int, int, int>;

Worth worth_of(const Instruction& instruction) {
  return {is_tensor(instruction) ? 1 : 0, is_global_load(instruction) && has_part(instruction, "128") ? 1 : 0, -1};
}

Worth sum(const Worth& a, const Worth& b) {
  return {std::get<0>(a) + std::get<0>(b), std::get<1>(a) + std::get<1>(b), std::get<2>(a) + std::get<2>(b)};
}

std::optional<size_t> index_of(const Kernel& kernel, uint32_t address) {
  const auto found = std::ranges::lower_bound(kernel.code, address, {}, &Instruction::address);
  if (found == kernel.code.end() || found->address != address) return std::nullopt;
  return static_cast<size_t>(found - kernel.code.begin());
}

bool goes_on(const Instruction& instruction) {
  return instruction.conditional || !starts_with_any(instruction.opcode, {"BRA", "BRX", "JMP", "EXIT", "RET"});
}

}  // namespace

std::optional<Instruction> parse_line(std::string_view line) {
  // "        /*00a0*/              @!P0 BRA P1, 0x3a0 ;      /* 0x… */"; the address is of hexadecimal digits alone.
  std::string_view text = trimmed(line);
  if (!text.starts_with("/*")) return std::nullopt;
  const auto digits = between(text, "/*", "*/");
  const auto address = digits ? parse_number(*digits, 16) : std::nullopt;
  const auto body = between(text, "*/", ";");
  if (!address || !body) return std::nullopt;
  text = trimmed(*body);
  Instruction instruction{*address, {}};
  if (text.starts_with("@")) {
    instruction.conditional = true;
    take_word(text);
  }
  instruction.opcode = take_word(text);
  if (instruction.opcode.empty()) return std::nullopt;
  if (starts_with_any(instruction.opcode, {"BRA", "JMP"})) {
    // Operands in front of the target are further conditions: "P1, 0x3a0".
    if (text.find(',') != std::string_view::npos) instruction.conditional = true;
    const size_t hex = text.rfind("0x");
    if (hex != std::string_view::npos) instruction.target = parse_number(text.substr(hex + 2), 16);
  }
  return instruction;
}

std::vector<Kernel> parse_listing(std::istream& listing) {
  constexpr std::string_view heading = "Function : ";
  std::vector<Kernel> kernels;
  for (std::string line; std::getline(listing, line);) {
    const std::string_view text = trimmed(line);
    if (text.starts_with(heading)) {
      kernels.push_back({demangled(std::string(text.substr(heading.size()))), {}});
    } else if (!kernels.empty()) {
      if (auto instruction = parse_line(text)) kernels.back().code.push_back(std::move(*instruction));
    }
  }
  return kernels;
}

std::vector<Resources> parse_resources(std::istream& listing) {
  // " Function NAME:" and, on the next line, "  REG:167 STACK:0 SHARED:0 …".
  std::vector<Resources> all;
  std::string name;
  for (std::string line; std::getline(listing, line);) {
    if (const auto mangled = between(line, " Function ", ":")) {
      name = demangled(std::string(*mangled));
      continue;
    }
    const auto shared = between(line, " SHARED:", " ");
    const auto bytes = shared ? parse_number(*shared, 10) : std::nullopt;
    if (bytes) all.push_back({name, *bytes});
  }
  return all;
}

std::optional<Loop> main_loop(const Kernel& kernel) {
  std::vector<int> tensor_before{0};
  for (const Instruction& instruction : kernel.code) {
    tensor_before.push_back(tensor_before.back() + (is_tensor(instruction) ? 1 : 0));
  }
  std::optional<Loop> best;
  std::tuple<bool, int, int64_t> most{};
  for (size_t last = 0; last < kernel.code.size(); ++last) {
    if (!kernel.code[last].target || *kernel.code[last].target > kernel.code[last].address) continue;
    const auto first = index_of(kernel, *kernel.code[last].target);
    if (!first) continue;
    const int tensor = tensor_before[last + 1] - tensor_before[*first];
    if (tensor == 0) continue;
    // What is done rarely stands behind everything else and branches back: from where it goes nothing leads to it.
    const bool turns = !steady_way(kernel, {*first, last}).empty();
    const std::tuple<bool, int, int64_t> worth{turns, tensor, -static_cast<int64_t>(last - *first)};
    if (best && worth <= most) continue;
    best = Loop{*first, last};
    most = worth;
  }
  return best;
}

std::vector<size_t> steady_way(const Kernel& kernel, const Loop& loop) {
  // From the end to the beginning: what the best way from each instruction to the closing branch is worth, and the
  // instruction that it goes to next. Only ways forward count, so each is final when it is asked for. Regions that
  // converge again (BSSY … BSYNC) need nothing: BSYNC stands in front of the place where they do.
  struct Best {
    std::optional<Worth> worth;
    size_t next;
  };
  std::vector<Best> best(loop.last + 1);
  for (size_t i = loop.last + 1; i-- > loop.first;) {
    const Instruction& instruction = kernel.code[i];
    if (i == loop.last) {
      best[i] = {worth_of(instruction), i};
      continue;
    }
    const auto consider = [&](size_t next) {
      if (next <= i || next > loop.last || !best[next].worth) return;
      const Worth worth = sum(worth_of(instruction), *best[next].worth);
      if (!best[i].worth || worth > *best[i].worth) best[i] = {worth, next};
    };
    if (goes_on(instruction)) consider(i + 1);
    if (const auto target = instruction.target ? index_of(kernel, *instruction.target) : std::nullopt)
      consider(*target);
  }
  std::vector<size_t> way;
  if (!best[loop.first].worth) return way;
  for (size_t i = loop.first;; i = best[i].next) {
    way.push_back(i);
    if (i == loop.last) return way;
  }
}

bool is_tensor(const Instruction& instruction) { return starts_with_any(instruction.opcode, {"HMMA", "IMMA"}); }

bool is_global_load(const Instruction& instruction) {
  return instruction.opcode == "LDG" || starts_with_any(instruction.opcode, {"LDG.", "LDGSTS"});
}

bool is_local(const Instruction& instruction) { return starts_with_any(instruction.opcode, {"LDL", "STL"}); }

bool is_call(const Instruction& instruction) {
  return !instruction.conditional && instruction.opcode.starts_with("CALL");
}

bool has_part(const Instruction& instruction, std::string_view part) {
  std::string_view rest = instruction.opcode;
  while (!rest.empty()) {
    const size_t dot = std::min(rest.find('.'), rest.size());
    if (rest.substr(0, dot) == part) return true;
    rest.remove_prefix(std::min(dot + 1, rest.size()));
  }
  return false;
}

}  // namespace w4q::test::sass
