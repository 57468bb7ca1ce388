// What `quantize --target-bpw` and --target-size chose, beside what other sizes would give.
#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "report/html.h"
#include "report/layer_map.h"
#include "report/plot.h"
#include "report/sections.h"

namespace w4q::report {
namespace {

/// "12×3 16×4": tensors of each width.
std::string widths_of(const io::Json& point) {
  std::string text;
  const auto& tensors = at(point, "tensors");
  if (!tensors.is_object()) return "–";
  for (const auto& [bits, count] : tensors.items())
    text += concat(text.empty() ? "" : " ", name_of(count), "×", name_of(bits));
  return text;
}

PlotLine line_of(const char* name, const char* style, const io::Json& points, bool marks) {
  PlotLine line{name, style, {}, marks};
  for (const auto& point : points) {
    const double bits = real(at(point, "bits_per_weight")), cost = real(at(point, "divergence"));
    line.points.push_back(
        {bits, cost, 0, 0, concat(name, ": ", bits, " bits a weight, ", cost, "; ", widths_of(point))});
  }
  return line;
}

std::string frontier_plot(const io::Json& allocation) {
  const bool measured = at(allocation, "measured") != false;
  std::vector<PlotLine> lines{line_of("the best of each size", "a", at(allocation, "frontier"), true),
                              line_of("one width for all", "base", at(allocation, "uniform"), true),
                              line_of("chosen", "b", io::Json::array({at(allocation, "chosen")}), true)};
  std::vector<double> xs, ys;
  for (const auto& line : lines) {
    for (const auto& point : line.points) {
      xs.push_back(point.x);
      ys.push_back(point.y);
    }
  }
  const char* cost = measured ? "expected KL, nats" : "sum of relative errors";
  return line_plot(concat(cost, " against bits a weight"), axis_over("bits a weight", xs, false),
                   axis_over(cost, ys, true), lines);
}

std::string points_table(const io::Json& allocation) {
  Rows rows;
  const auto add = [&](const char* what, const io::Json& point) {
    if (rows.size() < kinds_shown) {
      rows.push_back({what, number(at(point, "bits_per_weight")), number(at(point, "divergence")), widths_of(point)});
    }
  };
  add("chosen", at(allocation, "chosen"));
  for (const auto& point : at(allocation, "uniform")) add("one width for all", point);
  for (const auto& point : at(allocation, "frontier")) add("the best of its size", point);
  const char* cost = at(allocation, "measured") != false ? "expected KL, nats" : "sum of relative errors";
  return concat("<details><summary>Sizes that were looked at</summary>",
                table({"", "bits a weight", cost, "tensors × width"}, rows), "</details>\n");
}

/// Which width each linear has: of a plan with its scales and tables, of a run that measured mixes that of its codes.
std::string chosen_map(const io::Json& report) {
  std::vector<TensorValue> bits;
  for (const auto& tensor : at(report, "tensors")) {
    const auto& width = at(tensor, "bits_per_weight");
    if (at(tensor, "scheme").is_string() && width.is_number())
      bits.push_back({text_of(at(tensor, "name")), real(width)});
  }
  if (bits.empty()) {
    for (const auto& linear : at(at(at(report, "allocation"), "mix"), "linears")) {
      bits.push_back({text_of(at(linear, "name")), real(at(linear, "bits"))});
    }
  }
  const auto maps = layer_maps({bits}, bits_in_cells);
  if (maps.empty()) return {};
  return heat_map("bits a weight of each layer and kind, as chosen", maps.front()) +
         remark("Bits a weight as chosen, by layer (across) and kind; of experts the mean.");
}

/// Of mixes that were measured by predictions.
std::string mix_table(const io::Json& allocation) {
  const auto& mix = at(allocation, "mix");
  if (!mix.is_object()) return {};
  return table({"measured on predictions", "value"},
               {{"windows × tokens", concat(number(at(mix, "windows")), " × ", number(at(mix, "length")))},
                {"KL of what was chosen, nats", number(at(mix, "kl"))},
                {"KL of the neighbouring widths mixed by layers", number(at(mix, "kl_of_neighbours"))},
                {"exchanges that helped, of those tried",
                 concat(number(at(mix, "exchanges_taken")), " of ", number(at(mix, "exchanges_tried")))}});
}

}  // namespace

std::string allocation_section(const Parts& parts) {
  std::string html;
  for (const auto& part : parts) {
    const auto& allocation = at(*part.json, "allocation");
    if (!allocation.is_object()) continue;
    html += subtitle(part.name) + frontier_plot(allocation) + mix_table(allocation) + points_table(allocation) +
            chosen_map(*part.json);
  }
  return section("Allocation: bits where they are worth most", html);
}

}  // namespace w4q::report
