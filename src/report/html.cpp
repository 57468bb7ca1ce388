#include "report/html.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/entities.h"
#include "core/text.h"

namespace w4q::report {

std::string escape(std::string_view text) { return with_entities(printable(text)); }

std::string name_of(const std::string& text) {
  constexpr size_t longest = 300;
  return text.size() <= longest ? escape(text) : escape(text.substr(0, longest)) + "…";
}

std::string name_of(const io::Json& value) {
  return value.is_null() ? "–" : name_of(value.is_string() ? value.get<std::string>() : value.dump());
}

std::string text_of(const io::Json& value) { return value.is_string() ? value.get<std::string>() : ""; }

std::string code(const std::string& html) { return "<code>" + html + "</code>"; }

std::string number(const io::Json& value, int digits) {
  if (!value.is_number()) return "–";
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", value.is_number_integer() ? 17 : digits, value.get<double>());
  return concat("<data value=\"", value.dump(), "\">", text, "</data>");
}

std::string bytes(const io::Json& value) {
  if (!value.is_number()) return "–";
  const double count = std::clamp(value.get<double>(), 0.0, 9e18);
  return concat("<data value=\"", value.dump(), "\">", human_bytes(static_cast<int64_t>(count)), "</data>");
}

std::string percent(const io::Json& share) {
  return concat("<data value=\"", share.dump(), "\">", share.is_number() ? fixed(100 * real(share), 2) + " %" : "–",
                "</data>");
}

const io::Json& at(const io::Json& object, std::string_view key) {
  static const io::Json nothing;
  if (!object.is_object()) return nothing;
  const auto found = object.find(key);
  return found == object.end() ? nothing : *found;
}

double real(const io::Json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::string table(const std::vector<std::string>& head, const Rows& rows) {
  std::string html = "<div class=\"scroll\"><table><thead><tr>";
  for (const auto& cell : head) html += "<th scope=\"col\">" + cell + "</th>";
  html += "</tr></thead><tbody>\n";
  for (const auto& row : rows) {
    html += "<tr>";
    for (const auto& cell : row) html += "<td>" + cell + "</td>";
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string section(std::string_view title, const std::string& content) {
  if (content.empty()) return {};
  return concat("<section>\n<h2>", title, "</h2>\n", content, "</section>\n");
}

std::string subtitle(const std::string& name) { return name.empty() ? "" : concat("<h3>", name, "</h3>\n"); }

std::string remark(const std::string& html) { return "<p class=\"remark\">" + html + "</p>\n"; }

}  // namespace w4q::report
