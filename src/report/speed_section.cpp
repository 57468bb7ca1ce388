// What verify --speed, verify --kernels and bench measured on a GPU.
#include <cmath>
#include <map>

#include "core/text.h"
#include "report/html.h"
#include "report/plot.h"
#include "report/sections.h"

namespace w4q::report {
namespace {

/// What a part tells of speed: all of bench, or what verify measured.
Parts speeds_of(const Parts& parts) {
  Parts speeds;
  for (const auto& part : parts) {
    const auto& report = *part.json;
    const auto& speed = at(report, "schema") == "bench" ? report : at(report, "speed");
    if (speed.is_object()) speeds.push_back({part.name, &speed});
  }
  return speeds;
}

std::string rate_text(double rate, double bandwidth) {
  return concat(fixed(rate * 1e-9, 0), " GB/s, ", fixed(100 * rate / bandwidth, 1), " %");
}

std::string roofline(const io::Json& speed) {
  std::vector<Bar> bars;
  const double bandwidth = real(at(speed, "read_bandwidth"));
  const auto add = [&](const std::string& name, double rate) {
    if (std::isfinite(rate) && rate > 0) bars.push_back({name, "a", rate, rate_text(rate, bandwidth)});
  };
  bars.push_back({"reading alone", "base", bandwidth, concat(fixed(bandwidth * 1e-9, 0), " GB/s")});
  add("a whole token", real(at(speed, "bandwidth")));
  for (const auto& part : at(speed, "parts")) {
    if (bars.size() >= kinds_shown) break;
    add(name_of(at(part, "name")), real(at(part, "bytes")) / real(at(part, "seconds")));
  }
  return bar_plot("bytes a second beside what reading alone reaches", bars, bandwidth);
}

/// Where the time of a token goes.
std::string step_table(const io::Json& speed) {
  Rows rows;
  for (const auto& part : at(speed, "parts")) {
    if (rows.size() == kinds_shown) break;
    const double seconds = real(at(part, "seconds")), rate = real(at(part, "bytes")) / seconds;
    rows.push_back({name_of(at(part, "name")), number(at(part, "launches")), bytes(at(part, "bytes")),
                    concat("<data value=\"", at(part, "seconds").dump(), "\">", fixed(1e6 * seconds, 1), "</data>"),
                    std::isfinite(rate) && rate > 0 ? rate_text(rate, real(at(speed, "read_bandwidth"))) : "–"});
  }
  if (rows.empty()) return {};
  return concat("<details><summary>Where the time of a token goes</summary>",
                table({"part", "launches", "bytes", "µs", "rate, of reading alone"}, rows), "</details>\n");
}

}  // namespace

std::string speed_section(const Parts& parts) {
  const Parts speeds = speeds_of(parts);
  if (speeds.empty()) return {};
  std::vector<std::string> head{"measure"};
  Rows rows = {{"GPU"},
               {"prompt, tokens/s"},
               {"time to first token, s"},
               {"generation, tokens/s"},
               {"bytes read for a token"},
               {"share of the read roofline"},
               {"launches for a token"}};
  std::string plots;
  for (const auto& [name, speed] : speeds) {
    head.push_back(name.empty() ? "value" : name);
    size_t row = 0;
    for (const std::string& cell :
         {name_of(at(*speed, "gpu")), number(at(*speed, "prompt_tokens_per_second")),
          number(at(*speed, "time_to_first_token")), number(at(*speed, "tokens_per_second")),
          bytes(at(*speed, "step_bytes")), percent(at(*speed, "share_of_roofline")), number(at(*speed, "launches"))}) {
      rows[row++].push_back(cell);
    }
    plots += subtitle(name) + roofline(*speed) + step_table(*speed);
  }
  return section("Speed beside the roofline", table(head, rows) + plots);
}

std::string kernels_section(const Parts& parts) {
  struct Line {
    int64_t layers = 0;
    const io::Json* worst = nullptr;
  };
  std::string html;
  for (const auto& part : parts) {
    const auto& kernels = at(*part.json, "kernels");
    if (!kernels.is_array()) continue;
    std::map<std::pair<std::string, std::string>, Line> lines;
    for (const auto& layer : kernels) {
      Line& line = lines[{name_of(at(layer, "scheme")), name_of(at(layer, "kernels"))}];
      ++line.layers;
      const bool worse = line.worst == nullptr || !(real(at(layer, "to_fp64")) <= real(at(*line.worst, "to_fp64")));
      if (worse) line.worst = &layer;
    }
    Rows rows;
    for (const auto& [key, line] : lines) {
      if (rows.size() == kinds_shown) break;
      rows.push_back({code(key.first), key.second, concat(line.layers), code(name_of(at(*line.worst, "name"))),
                      number(at(*line.worst, "to_fp64"), 3), number(at(*line.worst, "to_cpu"), 3),
                      number(at(*line.worst, "bound"), 3)});
    }
    html += subtitle(part.name) +
            table({"scheme", "kernels", "layers", "worst layer", "to fp64", "to the CPU", "bound"}, rows);
  }
  return section("Kernels", html);
}

}  // namespace w4q::report
