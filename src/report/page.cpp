#include "report/page.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/text.h"
#include "report/html.h"
#include "report/sections.h"

namespace w4q::report {
namespace {

constexpr std::string_view page_style = R"(
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #5a636e; --rule: #d5dae0; --a: #2466ac;
  --b: #c2571a; --c: #2e7d4f; --d: #8a4fb0; --e: #a8234e; --f: #0f7c86; --g: #7a6a10; --h: #5b5fc7; --base: #77808b; --good: #176f37; --bad: #b3261e; --shade: #f3f5f8;
  --h0: #edf4fb; --h1: #d6e6f5; --h2: #bcd6ee; --h3: #9cc3e4; --h4: #77abd6; --h5: #4a88c0; --h6: #2f70ad; --h7: #1d5592;
  --h8: #0d3b70; --low: #1b1f24; --high: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --text: #e4e8ed; --soft: #a2acb8; --rule: #3a424c;
  --a: #74aef0; --b: #f0a068; --c: #7fd09c; --d: #cf9df0; --e: #f58aa8; --f: #64ccd6; --g: #d6c460; --h: #a9acf5; --base: #98a2ae; --good: #6fcf8f; --bad: #ff8a80; --shade: #1e2329;
  --h0: #15273b; --h1: #193450; --h2: #1d4166; --h3: #23507d; --h4: #2a6096; --h5: #5f98cf; --h6: #84b3e0; --h7: #abcdee;
  --h8: #d8e9f9; --low: #e4e8ed; --high: #14171b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1rem 0 0.25rem; }
.scroll { overflow-x: auto; max-width: 100%; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid var(--rule); }
td { overflow-wrap: break-word; max-width: 40rem; unicode-bidi: isolate; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
code { font-size: 0.85rem; overflow-wrap: anywhere; unicode-bidi: isolate; }
.verdict { font-size: 1.2rem; font-weight: 600; padding: 0.5rem 0.75rem; background: var(--shade); border-left: 4px solid; }
.pass { color: var(--good); } .fail { color: var(--bad); } .pass, .fail { white-space: nowrap; }
p.pass, p.fail { white-space: normal; }
.faults { margin: 0.25rem 0; padding-left: 1.2rem; color: var(--bad); overflow-wrap: anywhere; }
.remark, .legend { color: var(--soft); font-size: 0.85rem; margin: 0.25rem 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
svg { display: block; width: 100%; min-width: 34rem; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--text); } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; } .mark { stroke-width: 0; } .interval { stroke-width: 6; stroke-opacity: 0.3; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; margin-left: 0.75rem; }
)";

/// The colours of models and of the base.
std::string side_style() {
  std::string css;
  for (const char* side : {"a", "b", "c", "d", "e", "f", "g", "h", "base"}) {
    css += concat(".", side, " { stroke: var(--", side, "); }\n.mark.", side, ", .bar.", side, ", .key.", side,
                  " { fill: var(--", side, "); background: var(--", side, "); stroke: none; }\n");
  }
  return css + ".line.base { stroke-dasharray: 5 4; }\n";
}

/// The colours of heat maps, and of the text on them.
std::string heat_style() {
  std::string css;
  for (int i = 0; i < 9; ++i) {
    css += concat(".h", i, " rect { fill: var(--h", i, "); } .h", i, " text { fill: var(--", i < 5 ? "low" : "high",
                  "); }\n");
  }
  return css;
}

/// What no element ends early: "<" as JSON writes it otherwise.
std::string script_text(const io::Json& report) {
  std::string text;
  for (const char c : report.dump()) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

/// From what is missed least.
constexpr std::array long_parts = {"/statistics",
                                   "/decoder",
                                   "/reference",
                                   "/kernels",
                                   "/kv",
                                   "/notes",
                                   "/groups",
                                   "/allocation/mix/linears",
                                   "/perplexity/per_window",
                                   "/a/perplexity/per_window",
                                   "/b/perplexity/per_window",
                                   "/tensors",
                                   "/weights/tensors",
                                   "/linears",
                                   "/checks",
                                   "/speed",
                                   "/sizes",
                                   "/provenance"};

/// The report, or all of several, as an element, in `room` bytes.
std::string carried(io::Json reports, size_t room) {
  const auto element = [&] { return script_text(reports.size() == 1 ? reports.front() : reports); };
  std::string text = element();
  std::vector<std::string> left_out;
  for (const char* part : long_parts) {
    if (text.size() <= room) break;
    const io::Json::json_pointer pointer(part);
    bool found = false;
    for (auto& report : reports) {
      if (!report.contains(pointer)) continue;
      report[pointer.parent_pointer()].erase(pointer.back());
      found = true;
    }
    if (!found) continue;
    left_out.emplace_back(part + 1);
    text = element();
  }
  std::string html = "<script type=\"application/json\" id=\"report\">" + text + "</script>\n";
  if (left_out.empty()) return html;
  return html + remark(concat("Left out of the JSON in this page for its size: ", join(left_out), "; --json has all."));
}

std::string title_of(const io::Json& report) {
  std::vector<std::string> names;
  for (const auto& model : at(at(report, "provenance"), "models")) {
    if (at(model, "role") == "base") continue;
    std::string path = text_of(at(model, "path"));
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    names.push_back(escape(path.substr(path.rfind('/') + 1).substr(0, 200)));
  }
  const std::string command = concat("w4q ", name_of(at(report, "schema")));
  return names.empty() ? command : concat(command, ": ", join(names, " and "));
}

std::string body_of(const Parts& parts) {
  const Sides sides = sides_of(parts);
  const bool failed = std::ranges::any_of(parts, [](const Part& part) { return at(*part.json, "passed") == false; });
  return verdict_section(parts) + (failed ? checks_section(parts) : "") + kl_section(sides) + sizes_section(sides) +
         allocation_section(parts) + windows_section(sides) + errors_section(sides) + speed_section(parts) +
         kernels_section(parts) + (failed ? "" : checks_section(parts)) + provenance_section(parts);
}

std::string whole_page(const std::string& title, const Parts& parts, const io::Json& reports) {
  std::string html = concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
                            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>", title,
                            "</title>\n<style>", page_style, side_style(), heat_style(),
                            "</style>\n</head>\n<body>\n<h1>", title, "</h1>\n", body_of(parts));
  html += "<section>\n<h2>Data</h2>\n" +
          remark(concat("Every figure above is one of the report", parts.size() > 1 ? "s" : "",
                        " that --json prints, which this page holds in the element “report”."));
  constexpr size_t end = 1000;
  const size_t used = html.size() + end;
  html += carried(reports, used < most_page_bytes ? most_page_bytes - used : 0);
  return html + "</section>\n</body>\n</html>\n";
}

/// What is read is what --json prints: names without bytes that are no UTF-8, null for NaN.
io::Json printed(const io::Json& report) {
  return io::Json::parse(report.dump(-1, ' ', false, io::Json::error_handler_t::replace));
}

void check(const NamedReport& report, size_t count) {
  const std::string schema = text_of(at(report.json, "schema")), name = printable(report.name);
  const bool chooses = schema == "quantize" || schema == "plan";
  if (chooses && !at(report.json, "allocation").is_object()) {
    throw Error(ErrorCode::bad_argument, concat(name, ": a report of quantize in which no bits were chosen"))
        .hint("--target-bpw or --target-size, with --json");
  }
  if (schema == "compare" && count > 1) {
    throw Error(ErrorCode::bad_argument, concat(name, ": compare has a page of its own"))
        .hint("reports of w4q verify --json stand side by side, however many");
  }
  if (chooses || schema == "verify" || schema == "compare" || schema == "bench") return;
  throw Error(ErrorCode::bad_argument,
              concat(name, ": only reports of verify, compare, bench and quantize have a page"))
      .detail(concat("got ", schema.empty() ? "JSON without a schema" : printable(schema)));
}

}  // namespace

std::string html_page(const io::Json& report) {
  const auto& schema = at(report, "schema");
  if (schema != "verify" && schema != "compare") {
    throw Error(ErrorCode::bad_argument, "only reports of verify and compare have a page");
  }
  const io::Json json = printed(report);
  return whole_page(title_of(json), {{"", &json}}, io::Json::array({json}));
}

std::string joint_page(const std::vector<NamedReport>& reports) {
  io::Json all = io::Json::array();
  std::vector<std::string> names;
  for (const auto& report : reports) {
    check(report, reports.size());
    all.push_back(report.json);
    names.push_back(name_of(report.name));
  }
  Parts parts;
  for (size_t i = 0; i < reports.size(); ++i) parts.push_back({reports.size() > 1 ? names[i] : "", &all[i]});
  try {
    return whole_page(reports.size() == 1 ? title_of(all[0]) : concat("w4q report: ", join(names, ", ")), parts, all);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::bad_file, concat(printable(join(names, ", ")), ": is not as its schema says"))
        .detail(error.what());
  }
}

}  // namespace w4q::report
