#include "core/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "core/text.h"

namespace w4q {
namespace {

/// Whether a byte begins a code point.
bool begins(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

/// How lines begin that say how something went.
constexpr std::array<std::pair<std::string_view, Colour>, 7> coloured_beginnings{{{"pass ", Colour::green},
                                                                                  {"FAIL ", Colour::red},
                                                                                  {"verified: ", Colour::green},
                                                                                  {"verification FAILED", Colour::red},
                                                                                  {"NOT LOSSLESS", Colour::red},
                                                                                  {"warning: ", Colour::yellow},
                                                                                  {"note: ", Colour::yellow}}};

}  // namespace

bool is_terminal(int stream) { return isatty(stream) == 1 && variable("TERM") != "dumb"; }

bool takes_colours(int stream) { return is_terminal(stream) && variable("NO_COLOR").empty(); }

size_t terminal_width(int stream) {
  winsize size{};
  constexpr size_t usual = 80;
  return ioctl(stream, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : usual;
}

size_t display_width(std::string_view text) { return static_cast<size_t>(std::ranges::count_if(text, begins)); }

std::string clipped(std::string_view text, size_t columns) {
  size_t end = 0, used = 0;
  for (; end < text.size(); ++end) {
    if (begins(text[end]) && ++used > columns) break;
  }
  return std::string(text.substr(0, end));
}

std::string in_colour(Colour colour, std::string_view text) {
  constexpr std::array<int, 4> codes{31, 32, 33, 1};
  return concat("\033[", codes[static_cast<size_t>(colour)], "m", text, "\033[0m");
}

std::string coloured_lines(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    std::string shown(line);
    for (const auto& [beginning, colour] : coloured_beginnings) {
      if (!line.starts_with(beginning)) continue;
      const size_t length = beginning.find_last_not_of(" :") + 1;  // the word alone: what follows is to be read
      shown = in_colour(colour, line.substr(0, length)) + std::string(line.substr(length));
    }
    result += shown;
    text.remove_prefix(line.size());
    if (!text.empty()) result += '\n', text.remove_prefix(1);
  }
  return result;
}

}  // namespace w4q
