// What stands behind a standard stream, and how text fits there.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace w4q {

/// Whether a file descriptor is a terminal on which a line can be written over: not one that says TERM=dumb.
bool is_terminal(int stream);

/// Whether colours may be written to it: a terminal, and no NO_COLOR in the environment (no-color.org).
bool takes_colours(int stream);

/// Columns of the terminal; 80 where it does not say.
size_t terminal_width(int stream);

/// Columns that `text` takes: code points, which is right for what w4q prints.
size_t display_width(std::string_view text);

/// The first `columns` columns of `text`.
std::string clipped(std::string_view text, size_t columns);

enum class Colour { red, green, yellow, bold };

/// `text` as a terminal shows it in that colour.
std::string in_colour(Colour colour, std::string_view text);

/// Whole lines as they are printed for people: "pass" green, "FAIL" red, notes and warnings yellow.
std::string coloured_lines(std::string_view text);

}  // namespace w4q
