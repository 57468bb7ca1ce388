#include "report/sections.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "core/text.h"
#include "model/kinds.h"
#include "report/html.h"
#include "report/layer_map.h"
#include "report/plot.h"

namespace w4q::report {
namespace {

constexpr size_t faults_shown = 20, verdicts_shown = 8, tensors_shown = 20, points_shown = 400;

std::string mark(const io::Json& passed) {
  const bool good = passed.is_boolean() && passed.get<bool>();
  return good ? "<span class=\"pass\">✓ pass</span>" : "<span class=\"fail\">✗ FAIL</span>";
}

/// Of a number held against a limit: a rule may ask for more than one before it calls a fault.
std::string mark(const io::Json& verdict, const io::Json& check) {
  const bool beyond = at(verdict, "passed") != true && at(check, "passed") == true;
  return beyond ? "beyond, which alone is no fault" : mark(at(verdict, "passed"));
}

std::string more(size_t all, size_t shown, const char* of) {
  return all <= shown ? "" : remark(concat("… and ", all - shown, " more ", of, ", in the JSON below"));
}

const io::Json& base_of(const Side& side) { return at(*side.quality, "base"); }

/// A table whose first column says what, with a column for each side that `has` something.
Rows compared(const Sides& sides, const std::vector<std::string>& what,
              const std::function<std::string(const Side&, size_t)>& cell) {
  Rows rows;
  for (size_t row = 0; row < what.size(); ++row) {
    rows.push_back({what[row]});
    for (const auto& side : sides) rows.back().push_back(cell(side, row));
  }
  return rows;
}

std::vector<std::string> side_heads(const Sides& sides) {
  std::vector<std::string> head{""};
  for (const auto& side : sides) head.push_back(side.name);
  return head;
}

std::string verdict_of_comparison(const io::Json& report) {
  const auto& verdict = at(report, "verdict");
  if (!verdict.is_number()) return "<p class=\"verdict\">Compared by weights alone: no text was given</p>\n";
  const double found = real(verdict);
  const char* said = found < 0   ? "B is closer to the base"
                     : found > 0 ? "A is closer to the base"
                                 : "no difference beyond chance";
  std::string html = concat("<p class=\"verdict\">", said, "</p>\n");
  Rows rows;
  for (const auto& [key, words] : {std::pair{"nll_difference", "negative log-likelihood, nats a token"},
                                   {"kl_difference", "KL to the base, nats a token"},
                                   {"top1_difference", "share of tokens with another most likely next token"}}) {
    const auto& difference = at(report, key);
    rows.push_back({words, number(at(difference, "mean")), number(at(difference, "error")),
                    concat(number(at(difference, "low")), " … ", number(at(difference, "high")))});
  }
  return html + table({"B − A, window by window", "mean", "standard error", "95 % interval"}, rows);
}

std::string faults_of(const io::Json& check) {
  const auto& faults = at(check, "faults");
  if (!faults.is_array() || faults.empty()) return {};
  std::string html = "<ul class=\"faults\">";
  for (size_t i = 0; i < std::min(faults.size(), faults_shown); ++i) html += "<li>" + name_of(faults[i]) + "</li>";
  return html + "</ul>" + more(faults.size(), faults_shown, "faults");
}

/// Those that failed, then those with the least margin; units differ from check to check, not within one.
std::vector<const io::Json*> nearest_verdicts(const io::Json& check) {
  std::vector<const io::Json*> result;
  for (const auto& verdict : at(check, "verdicts")) result.push_back(&verdict);
  const auto margin = [](const io::Json* verdict) {
    const double value = real(at(*verdict, "margin"));
    return std::isnan(value) ? -std::numeric_limits<double>::infinity() : value;
  };
  std::ranges::stable_sort(result, {}, margin);
  result.resize(std::min(result.size(), verdicts_shown));
  return result;
}

std::string verdicts_table(const io::Json& checks) {
  Rows rows;
  size_t all = 0;
  for (const auto& check : checks) {
    all += at(check, "verdicts").size();
    for (const io::Json* verdict : nearest_verdicts(check)) {
      const bool least = at(*verdict, "at_least") == true;
      rows.push_back({name_of(at(check, "name")), name_of(at(*verdict, "of")), number(at(*verdict, "value")),
                      concat(least ? "≥&nbsp;" : "≤&nbsp;", number(at(*verdict, "limit"))),
                      number(at(*verdict, "margin")), mark(*verdict, check)});
    }
  }
  if (rows.empty()) return {};
  return concat("<h3>Numbers held against limits</h3>\n<div id=\"verdicts\">",
                table({"check", "of", "value", "limit", "margin", "result"}, rows), "</div>\n",
                more(all, rows.size(), "that hold by more"));
}

std::string worst_table(const Side& side) {
  std::vector<const Side::Tensor*> tensors;
  for (const auto& tensor : side.tensors) tensors.push_back(&tensor);
  const auto quality = [](const Side::Tensor* tensor) {
    const double error = real(at(*tensor->error, "relative_error"));
    return std::isnan(error) ? -std::numeric_limits<double>::infinity() : -error;
  };
  std::ranges::stable_sort(tensors, {}, quality);
  Rows rows;
  for (size_t i = 0; i < std::min(tensors.size(), tensors_shown); ++i) {
    const auto& error = *tensors[i]->error;
    rows.push_back({code(name_of(tensors[i]->name)), code(name_of(at(error, "scheme"))), number(at(error, "sqnr_db")),
                    number(at(error, "relative_error")), number(at(error, "max_error"))});
  }
  return concat("<details><summary>The worst of ", tensors.size(), side.name == "model" ? "" : " in " + side.name,
                "</summary>", table({"tensor", "scheme", "SQNR dB", "relative error", "max error"}, rows),
                "</details>\n");
}

PlotLine tail_of(const Side& side) {
  PlotLine line{side.name, side.style, {}, true};
  const auto& base = base_of(side);
  for (const auto& quantile : at(base, "kl_quantiles")) {
    const double share = real(at(quantile, "share"));
    line.points.push_back({real(at(quantile, "kl")), 1 - share, real(at(quantile, "low")), real(at(quantile, "high")),
                           concat(100 * share, " % of the tokens have at most ", real(at(quantile, "kl")), " nats")});
  }
  const double tokens = real(at(*side.quality, "scored_tokens"));
  const double most = real(at(base, "kl_max"));
  line.points.push_back({most, 1 / tokens, 0, 0, concat("the largest: ", most, " nats")});
  return line;
}

/// Windows put together until few enough are left to see.
std::vector<double> thinned(const std::vector<double>& values) {
  const size_t together = (values.size() + points_shown - 1) / points_shown;
  std::vector<double> result;
  for (size_t i = 0; i < values.size(); i += together) {
    double sum = 0;
    const size_t end = std::min(values.size(), i + together);
    for (size_t j = i; j < end; ++j) sum += values[j];
    result.push_back(sum / static_cast<double>(end - i));
  }
  return result;
}

PlotLine windows_of(const Side& side, const char* key, const std::string& name, const std::string& style) {
  std::vector<double> values;
  for (const auto& window : at(*side.quality, "per_window")) values.push_back(real(at(window, key)));
  const auto shown = thinned(values);
  PlotLine line{name, style, {}, shown.size() <= 64};
  const double step = shown.empty() ? 1 : static_cast<double>(values.size()) / static_cast<double>(shown.size());
  for (size_t i = 0; i < shown.size(); ++i) {
    const double window =
        shown.size() == values.size() ? static_cast<double>(i + 1) : (static_cast<double>(i) + 0.5) * step;
    line.points.push_back({window, shown[i], 0, 0, concat(name, ", window ", window, ": ", shown[i])});
  }
  return line;
}

std::string windows_plot(const char* title, const std::vector<PlotLine>& lines) {
  std::vector<double> xs, ys;
  for (const auto& line : lines) {
    for (const auto& point : line.points) {
      xs.push_back(point.x);
      ys.push_back(point.y);
    }
  }
  Axis y = axis_over(title, ys, false);
  y.least = 0;
  y.most *= 1.05;
  return line_plot(concat(title, " of each window"), axis_over("window", xs, false), y, lines);
}

/// The largest first, of the first side that has the kind.
std::vector<Bar> kind_bars(const Sides& sides) {
  std::vector<std::pair<double, std::string>> kinds;
  for (const auto& side : sides) {
    for (const auto& row : at(*side.sizes, "kinds")) {
      const std::string kind = text_of(at(row, "kind"));
      if (std::ranges::find(kinds, kind, &std::pair<double, std::string>::second) != kinds.end()) continue;
      kinds.emplace_back(-real(at(row, "bytes")), kind);
    }
  }
  std::ranges::sort(kinds);
  kinds.resize(std::min(kinds.size(), kinds_shown));
  std::vector<Bar> bars;
  for (const auto& [order, kind] : kinds) {
    for (const auto& side : sides) {
      for (const auto& row : at(*side.sizes, "kinds")) {
        if (at(row, "kind") != kind) continue;
        const double size = real(at(row, "bytes"));
        bars.push_back({sides.size() > 1 ? concat(name_of(kind), ", ", side.name) : name_of(kind), side.style, size,
                        human_bytes(static_cast<int64_t>(std::clamp(size, 0.0, 9e18)))});
      }
    }
  }
  return bars;
}

std::string kinds_table(const Side& side) {
  Rows rows;
  for (const auto& row : at(*side.sizes, "kinds")) {
    if (rows.size() == kinds_shown) break;
    rows.push_back({name_of(at(row, "kind")), number(at(row, "tensors")), code(name_of(at(row, "scheme"))),
                    number(at(row, "weights")), bytes(at(row, "bytes")), number(at(row, "bits_per_weight"), 4)});
  }
  return concat("<details><summary>Kind by kind", side.name == "model" ? "" : " in " + side.name, "</summary>",
                table({"kind", "count", "scheme", "weights", "bytes", "bits a weight"}, rows), "</details>\n");
}

/// Bits a weight of each tensor: those of its kind in its scheme.
std::vector<TensorValue> bits_of(const Side& side) {
  std::map<std::pair<std::string, std::string>, double> bits;
  for (const auto& row : at(*side.sizes, "kinds")) {
    bits[{text_of(at(row, "kind")), text_of(at(row, "scheme"))}] = real(at(row, "bits_per_weight"));
  }
  std::vector<TensorValue> result;
  for (const auto& tensor : side.tensors) {
    const auto found = bits.find({model::kind_of(tensor.name), text_of(at(*tensor.error, "scheme"))});
    if (found != bits.end()) result.push_back({tensor.name, found->second});
  }
  return result;
}

/// Nothing where the tensors of each model differ by little more than their tables.
std::string bits_maps(const Sides& sides) {
  std::vector<std::vector<TensorValue>> bits;
  bool differ = false;
  for (const auto& side : sides) {
    const auto& of = bits.emplace_back(bits_of(side));
    if (of.empty()) continue;
    const auto [least, most] = std::ranges::minmax(of, {}, &TensorValue::value);
    differ = differ || most.value > 1.1 * least.value;
  }
  if (!differ) return {};
  const auto maps = layer_maps(bits, bits_in_cells);
  std::string html;
  for (size_t i = 0; i < maps.size(); ++i) {
    html += subtitle(sides.size() > 1 ? sides[i].name : "") + heat_map("bits a weight of each layer and kind", maps[i]);
  }
  return html + remark("Bits a weight, by layer (across) and kind; of experts the mean.");
}

Rows provenance_of(const io::Json& report) {
  const auto& provenance = at(report, "provenance");
  Rows rows;
  if (provenance.is_object()) {
    rows.push_back({"command", code(name_of(at(provenance, "command")))});
    rows.push_back({"program", "w4q " + name_of(at(provenance, "w4q"))});
    for (const auto& model : at(provenance, "models")) {
      const auto& fingerprint = at(model, "fingerprint");
      rows.push_back(
          {name_of(at(model, "role")),
           concat(code(name_of(at(model, "path"))), "<br>",
                  fingerprint.is_null() ? "no digests beside it" : concat("written as ", code(name_of(fingerprint))))});
    }
  }
  if (at(report, "fingerprint").is_string()) {
    rows.push_back({"fingerprint as it is now", code(name_of(at(report, "fingerprint")))});
  }
  return rows;
}

Sides sides_of_comparison(const io::Json& report) {
  Sides sides;
  for (const auto& [key, name] : {std::pair{"a", "A"}, {"b", "B"}}) {
    const auto& json = at(report, key);
    Side side{name, key, &json, &at(json, "perplexity"), {}};
    for (const auto& linear : at(report, "linears")) {
      side.tensors.push_back({text_of(at(linear, "name")), &at(linear, key)});
    }
    sides.push_back(std::move(side));
  }
  return sides;
}

std::string verdict_of(const Part& part) {
  const auto& report = *part.json;
  size_t failed = 0, all = 0;
  for (const auto& check : at(report, "checks")) {
    ++all;
    failed += at(check, "passed") == true ? 0 : 1;
  }
  const bool passed = at(report, "passed") == true;
  std::string html =
      concat("<p class=\"verdict ", passed ? "pass\">✓ " : "fail\">✗ ", part.name.empty() ? "" : part.name + ": ",
             passed ? "verified: " : "FAILED: ", passed ? concat("all of ", all) : concat(failed, " of ", all),
             " checks ", passed ? "passed" : "failed", "</p>\n");
  for (const auto& note : at(report, "notes")) html += remark("note: " + name_of(note));
  return html;
}

}  // namespace

Sides sides_of(const Parts& parts) {
  static constexpr std::array styles{"a", "b", "c", "d", "e", "f", "g", "h"};
  Sides sides;
  for (const auto& part : parts) {
    const auto& report = *part.json;
    if (at(report, "schema") == "compare") return sides_of_comparison(report);
    if (at(report, "schema") != "verify") continue;
    Side side{part.name.empty() ? "model" : part.name,
              styles[sides.size() % styles.size()],
              &at(report, "sizes"),
              &at(report, "perplexity"),
              {}};
    for (const auto& tensor : at(at(report, "weights"), "tensors")) {
      side.tensors.push_back({text_of(at(tensor, "name")), &tensor});
    }
    sides.push_back(std::move(side));
  }
  return sides;
}

std::string verdict_section(const Parts& parts) {
  std::string html;
  for (const auto& part : parts) {
    const auto& report = *part.json;
    if (at(report, "schema") == "compare") html += verdict_of_comparison(report);
    if (at(report, "schema") == "verify") html += verdict_of(part);
  }
  return section("Verdict", html);
}

std::string checks_section(const Parts& parts) {
  std::string html;
  for (const auto& part : parts) {
    const auto& checks = at(*part.json, "checks");
    if (!checks.is_array()) continue;
    Rows rows;
    for (const auto& check : checks) {
      rows.push_back(
          {name_of(at(check, "name")), mark(at(check, "passed")), name_of(at(check, "detail")) + faults_of(check)});
    }
    html += subtitle(part.name) + table({"check", "result", "what was found"}, rows) + verdicts_table(checks);
  }
  return section("Checks", html);
}

std::string sizes_section(const Sides& sides) {
  if (std::ranges::all_of(sides, [](const Side& side) { return side.sizes->is_null(); })) return {};
  std::string html = table(
      side_heads(sides),
      compared(sides, {"size of all tensors", "bits a weight, of what is packed"}, [](const Side& side, size_t row) {
        return row == 0 ? bytes(at(*side.sizes, "bytes")) : number(at(*side.sizes, "bits_per_weight"));
      }));
  const auto bars = kind_bars(sides);
  if (bars.empty()) return section("Size", html);
  html += bar_plot("bytes of each kind of tensor", bars, std::ranges::max(bars, {}, &Bar::value).value);
  for (const auto& side : sides) html += kinds_table(side);
  return section("Size: where the bits went", html + bits_maps(sides));
}

std::string kl_section(const Sides& sides) {
  if (std::ranges::all_of(sides, [](const Side& side) { return base_of(side).is_null(); })) return {};
  struct Figure {
    const char *name, *key, *error;
  };
  static constexpr Figure figures[] = {{"mean KL, nats a token", "kl", "kl_error"},
                                       {"largest KL of a token", "kl_max", nullptr},
                                       {"perplexity over the base's", "ratio", "ratio_error"},
                                       {"other most likely token, share", "top1_changed", "top1_changed_error"},
                                       {"overlap of the five most likely", "top5_overlap", nullptr}};
  std::vector<std::string> names;
  for (const auto& figure : figures) names.emplace_back(figure.name);
  Rows rows = compared(sides, names, [](const Side& side, size_t row) {
    const Figure& figure = figures[row];
    return number(at(base_of(side), figure.key)) +
           (figure.error == nullptr ? "" : " ± " + number(at(base_of(side), figure.error), 2));
  });
  std::vector<PlotLine> lines;
  std::vector<double> xs, ys;
  for (const auto& side : sides) {
    const PlotLine& line = lines.emplace_back(tail_of(side));
    for (const auto& point : line.points) {
      for (const double x : {point.x, point.low, point.high}) xs.push_back(x);
      ys.push_back(point.y);
    }
  }
  const auto& most = at(base_of(sides.front()), "kl_quantiles");
  for (size_t i = 0; most.is_array() && i < most.size(); ++i) {
    rows.push_back({concat("KL that ", 100 * real(at(most[i], "share")), " % of the tokens do not exceed")});
    for (const auto& side : sides) {
      const auto& quantiles = at(base_of(side), "kl_quantiles");
      rows.back().push_back(quantiles.is_array() && i < quantiles.size() ? number(at(quantiles[i], "kl")) : "–");
    }
  }
  return section("Distance to the base: KL and its tail",
                 table(side_heads(sides), rows) +
                     line_plot("share of tokens with more KL than that", axis_over("KL to the base, nats", xs, true),
                               axis_over("share of tokens above", ys, true), lines) +
                     remark("Down and to the left is better; bars are 95 % intervals, the last mark is the largest."));
}

std::string windows_section(const Sides& sides) {
  if (std::ranges::all_of(sides, [](const Side& side) { return side.quality->is_null(); })) return {};
  std::string html = table(
      side_heads(sides), compared(sides, {"perplexity", "perplexity of the base", "windows", "tokens that were scored"},
                                  [](const Side& side, size_t row) {
                                    if (row == 0) {
                                      return number(at(*side.quality, "perplexity")) + " ± " +
                                             number(at(*side.quality, "perplexity_error"), 2);
                                    }
                                    return row == 1 ? number(at(base_of(side), "perplexity"))
                                                    : number(at(*side.quality, row == 2 ? "windows" : "scored_tokens"));
                                  }));
  std::vector<PlotLine> perplexity, kl;
  for (const auto& side : sides) {
    perplexity.push_back(windows_of(side, "perplexity", side.name, side.style));
    kl.push_back(windows_of(side, "kl", side.name, side.style));
  }
  const bool with_base = !base_of(sides.front()).is_null();
  if (with_base) perplexity.push_back(windows_of(sides.front(), "base_perplexity", "base", "base"));
  if (!perplexity.front().points.empty()) {
    html += windows_plot("perplexity", perplexity);
    if (with_base) html += windows_plot("KL", kl);
  }
  return section("Perplexity, window by window", html);
}

std::string errors_section(const Sides& sides) {
  std::vector<std::vector<TensorValue>> errors;
  for (const auto& side : sides) {
    auto& of = errors.emplace_back();
    for (const auto& tensor : side.tensors) of.push_back({tensor.name, real(at(*tensor.error, "relative_error"))});
  }
  const auto maps =
      layer_maps(errors, {"relative error", false, [](double error) { return fixed(100 * error, error < 0.1 ? 2 : 1); },
                          [](double error) { return fixed(error, 5); }});
  if (maps.empty()) return {};
  std::string html;
  for (size_t i = 0; i < sides.size(); ++i) {
    html += subtitle(sides.size() > 1 ? sides[i].name : "");
    html += heat_map("relative error of each layer and kind, in percent", maps[i]);
  }
  html += remark(
      "Relative error of the weights, ‖w − ŵ‖ / ‖w‖ in percent, by layer (across) and kind; of experts the worst.");
  for (const auto& side : sides) html += worst_table(side);
  return section("Error by layer and kind", html);
}

std::string provenance_section(const Parts& parts) {
  std::string html;
  for (const auto& part : parts) {
    const Rows rows = provenance_of(*part.json);
    if (!rows.empty()) html += subtitle(part.name) + table({"what", "value"}, rows);
  }
  return section("Provenance", html);
}

}  // namespace w4q::report
