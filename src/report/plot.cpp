#include "report/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/text.h"

namespace w4q::report {
namespace {

constexpr double plot_width = 720, plot_height = 300, left_edge = 72, right_edge = 704, top_edge = 14,
                 bottom_edge = 250;

std::string place(double value) { return fixed(value, 1); }

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string opened(const std::string& description, double width, double height) {
  return concat("<div class=\"scroll\"><svg viewBox=\"0 0 ", place(width), " ", place(height),
                "\" role=\"img\">\n<title>", description, "</title>\n");
}
constexpr const char* closed = "</svg></div>\n";

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return concat("<text x=\"", place(x), "\" y=\"", place(y), "\" text-anchor=\"", anchor, "\">", text, "</text>");
}

std::string line_from(double x1, double y1, double x2, double y2, const std::string& style) {
  return concat("<line class=\"", style, "\" x1=\"", place(x1), "\" y1=\"", place(y1), "\" x2=\"", place(x2),
                "\" y2=\"", place(y2), "\"/>");
}

bool shows(const Axis& axis, double value) { return std::isfinite(value) && (!axis.logarithmic || value > 0); }

/// Where it lies between both ends: 0 … 1, also of what lies beyond.
double share_of(const Axis& axis, double value) {
  const auto scaled = [&](double v) { return axis.logarithmic ? std::log10(v) : v; };
  const double least = scaled(axis.least), most = scaled(axis.most);
  return most > least ? std::clamp((scaled(value) - least) / (most - least), 0.0, 1.0) : 0.5;
}

double place_x(const Axis& axis, double value) { return left_edge + share_of(axis, value) * (right_edge - left_edge); }
double place_y(const Axis& axis, double value) {
  return bottom_edge - share_of(axis, value) * (bottom_edge - top_edge);
}

/// 1, 2 or 5 times a power of ten apart, about five of them; of logarithmic axes powers of ten, and 2 and 5 times these
/// where there are few.
std::vector<double> ticks(const Axis& axis) {
  std::vector<double> result;
  if (axis.logarithmic) {
    const double decades = std::log10(axis.most / axis.least);
    const double apart = std::ceil(decades / 8);
    for (double power = std::floor(std::log10(axis.least)); power <= std::log10(axis.most) + 0.01; power += apart) {
      for (const double times : {1.0, 2.0, 5.0}) {
        const double value = times * std::pow(10, power);
        const bool inside = value > axis.least * 0.999 && value < axis.most * 1.001;
        if (inside && (times == 1 || decades <= 2.5)) result.push_back(value);
      }
    }
    return result;
  }
  const double rough = (axis.most - axis.least) / 5;
  if (!(rough > 0)) return {axis.least};
  const double power = std::pow(10, std::floor(std::log10(rough)));
  const double step = power * (rough / power < 1.5 ? 1 : rough / power < 3.5 ? 2 : rough / power < 7.5 ? 5 : 10);
  const double first = std::ceil(axis.least / step) * step;
  for (int i = 0; i < 12 && first + i * step <= axis.most + step / 1000; ++i) {
    const double value = first + i * step;
    result.push_back(std::abs(value) < step / 1000 ? 0 : value);
  }
  return result;
}

std::string frame(const Axis& x, const Axis& y) {
  std::string svg;
  for (const double value : ticks(x)) {
    svg += line_from(place_x(x, value), top_edge, place_x(x, value), bottom_edge, "grid");
    svg += text_at(place_x(x, value), bottom_edge + 16, "middle", short_number(value));
  }
  for (const double value : ticks(y)) {
    svg += line_from(left_edge, place_y(y, value), right_edge, place_y(y, value), "grid");
    svg += text_at(left_edge - 6, place_y(y, value) + 4, "end", short_number(value));
  }
  svg += text_at((left_edge + right_edge) / 2, bottom_edge + 36, "middle", x.title);
  const double middle = (top_edge + bottom_edge) / 2;
  svg += concat("<text text-anchor=\"middle\" transform=\"translate(14 ", place(middle), ") rotate(-90)\">", y.title,
                "</text>\n");
  return svg;
}

std::string drawn(const PlotLine& line, const Axis& x, const Axis& y) {
  std::string path, marks;
  for (const PlotPoint& point : line.points) {
    if (!shows(x, point.x) || !shows(y, point.y)) continue;
    const double px = place_x(x, point.x), py = place_y(y, point.y);
    path += concat(path.empty() ? "" : " ", place(px), ",", place(py));
    if (!line.marks) continue;
    if (point.low < point.high && shows(x, point.low)) {
      marks += line_from(place_x(x, point.low), py, place_x(x, point.high), py, "interval " + line.style);
    }
    marks += concat("<circle class=\"mark ", line.style, "\" cx=\"", place(px), "\" cy=\"", place(py),
                    "\" r=\"4\"><title>", point.title, "</title></circle>");
  }
  return concat("<polyline class=\"line ", line.style, "\" points=\"", path, "\"/>", marks, "\n");
}

std::string legend(const std::vector<PlotLine>& lines) {
  std::string html = "<p class=\"legend\">";
  for (const auto& line : lines) html += concat("<span class=\"key ", line.style, "\"></span> ", line.name, " ");
  return html + "</p>\n";
}

int heat_colour(const HeatMap& map, double value) {
  if (!(map.most > map.least) || !(map.least > 0)) return heat_colours / 2;
  const double share = std::log(value / map.least) / std::log(map.most / map.least);
  return static_cast<int>(std::clamp(share * heat_colours, 0.0, heat_colours - 1.0));
}

}  // namespace

Axis axis_over(std::string title, const std::vector<double>& values, bool logarithmic) {
  Axis axis{std::move(title), 0, 1, logarithmic};
  std::vector<double> shown;
  std::ranges::copy_if(values, std::back_inserter(shown), [&](double value) { return shows(axis, value); });
  if (logarithmic) axis.least = 0.1;
  if (shown.empty()) return axis;
  const auto [least, most] = std::ranges::minmax(shown);
  if (!logarithmic) return {axis.title, least, most, false};
  axis.least = std::pow(10, std::floor(std::log10(least) + 1e-9));
  axis.most = std::pow(10, std::ceil(std::log10(most) - 1e-9));
  if (!(axis.most > axis.least)) axis.most = 10 * axis.least;
  return axis;
}

std::string line_plot(const std::string& description, const Axis& x, const Axis& y,
                      const std::vector<PlotLine>& lines) {
  std::string svg = opened(description, plot_width, plot_height) + frame(x, y);
  for (const auto& line : lines) svg += drawn(line, x, y);
  return svg + closed + legend(lines);
}

std::string bar_plot(const std::string& description, const std::vector<Bar>& bars, double most) {
  constexpr double height = 22, names = 190, room = 110;
  std::string svg = opened(description, plot_width, height * static_cast<double>(bars.size()) + 8);
  double y = 4;
  for (const auto& bar : bars) {
    const double share = most > 0 && std::isfinite(bar.value) ? std::clamp(bar.value / most, 0.0, 1.0) : 0;
    const double length = share * (plot_width - names - room);
    svg += text_at(names - 8, y + 14, "end", bar.name);
    svg += concat("<rect class=\"bar ", bar.style, "\" x=\"", place(names), "\" y=\"", place(y + 2), "\" width=\"",
                  place(length), "\" height=\"", place(height - 5), "\"/>");
    svg += text_at(names + length + 6, y + 14, "start", bar.text) + "\n";
    y += height;
  }
  return svg + closed;
}

std::string heat_map(const std::string& description, const HeatMap& map) {
  constexpr double names = 140, height = 24, head = 20;
  const auto columns = static_cast<double>(map.columns.size());
  const double width = std::clamp((plot_width - names) / columns, 9.0, 56.0);
  const bool wide = width >= 34;
  const size_t apart = wide ? 1 : static_cast<size_t>(std::ceil(34 / width));
  std::string svg = opened(description, std::max(plot_width, names + width * columns + 4),
                           head + height * static_cast<double>(map.rows.size()) + 4);
  for (size_t column = 0; column < map.columns.size(); column += apart) {
    svg += text_at(names + (static_cast<double>(column) + 0.5) * width, head - 6, "middle", map.columns[column]);
  }
  for (size_t row = 0; row < map.rows.size(); ++row) {
    const double y = head + height * static_cast<double>(row);
    svg += text_at(names - 8, y + 16, "end", map.rows[row]) + "\n";
    for (size_t column = 0; column < map.columns.size(); ++column) {
      const auto& cell = map.cells[row][column];
      if (std::isnan(cell.value)) continue;
      const double x = names + static_cast<double>(column) * width;
      const int colour = heat_colour(map, cell.value);
      svg += concat("<g class=\"h", colour, "\"><title>", cell.title, "</title><rect x=\"", place(x), "\" y=\"",
                    place(y), "\" width=\"", place(width - 1), "\" height=\"", place(height - 1), "\"/>",
                    wide ? text_at(x + width / 2, y + 16, "middle", cell.text) : "", "</g>");
    }
  }
  return svg + closed;
}

}  // namespace w4q::report
