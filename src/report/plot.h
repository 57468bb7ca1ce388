// Plots as SVG: no scripts, colours by the classes of the page, which has them for light and dark.
#pragma once

#include <string>
#include <vector>

namespace w4q::report {

/// A scale of a plot, from `least` to `most` (units of what is plotted); logarithmic: both more than 0.
struct Axis {
  std::string title;
  double least = 0, most = 1;
  bool logarithmic = false;
};

struct PlotPoint {
  double x = 0, y = 0;
  double low = 0, high = 0;  ///< an interval of x; equal: none
  std::string title;         ///< shown when it is pointed at; HTML
};

struct PlotLine {
  std::string name;   ///< HTML
  std::string style;  ///< class: "a", "b", "base"
  std::vector<PlotPoint> points;
  bool marks = false;  ///< a mark at each point
};

/// The axis over all finite values; on a logarithmic one those above 0, from one power of ten to another.
Axis axis_over(std::string title, const std::vector<double>& values, bool logarithmic);

/// Points that are not finite, or not above 0 on a logarithmic axis, are left out. `description` is for whoever does
/// not see it.
std::string line_plot(const std::string& description, const Axis& x, const Axis& y, const std::vector<PlotLine>& lines);

struct Bar {
  std::string name;   ///< HTML
  std::string style;  ///< class
  double value = 0;   ///< at least 0
  std::string text;   ///< beside it; HTML without elements
};
/// From left to right, the longest `most` long.
std::string bar_plot(const std::string& description, const std::vector<Bar>& bars, double most);

/// Rows and columns by name (HTML), cells by row.
struct HeatMap {
  std::vector<std::string> rows, columns;
  struct Cell {
    double value = 0;   ///< more than 0; NaN: an empty cell
    std::string text;   ///< in the cell, where columns are few
    std::string title;  ///< HTML
  };
  std::vector<std::vector<Cell>> cells;
  double least = 0, most = 0;  ///< of the colours: so that two maps can have the same
};
std::string heat_map(const std::string& description, const HeatMap& map);

/// Colours of heat maps: classes h0, the least, to h8.
inline constexpr int heat_colours = 9;

}  // namespace w4q::report
