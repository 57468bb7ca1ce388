// The page of a report: sound HTML whatever the names, and no figure that the report lacks.
#include "report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <regex>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "io/json.h"

namespace w4q::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* hostile = "model.layers.1.</script><script>alert('1')</script>&\"\x01_proj";

io::Json quality() {
  io::Json windows = io::Json::array();
  for (int i = 0; i < 3; ++i) {
    windows.push_back({{"scored_tokens", 100}, {"perplexity", 9.5 + i}, {"base_perplexity", 9.25 + i}, {"kl", 0.125}});
  }
  return {{"perplexity", 10.4375},
          {"perplexity_error", 0.5},
          {"windows", 3},
          {"scored_tokens", 300},
          {"per_window", windows},
          {"base",
           {{"perplexity", 10.1875},
            {"ratio", 1.0245},
            {"ratio_error", 0.001},
            {"kl", 0.12345678901},
            {"kl_error", 0.01},
            {"kl_max", 3.75},
            {"top1_changed", 0.0625},
            {"top1_changed_error", 0.01},
            {"top5_overlap", 0.9},
            {"kl_quantiles",
             {{{"share", 0.5}, {"kl", 0.0625}, {"low", 0.05}, {"high", 0.075}},
              {{"share", 0.99}, {"kl", 1.5}, {"low", nullptr}, {"high", nullptr}}}}}}};
}

io::Json sizes() {
  const io::Json kind = {{"kind", "up_proj"}, {"scheme", "kbit3-b32-e4m4"}, {"tensors", 2}, {"weights", 65536},
                         {"bytes", 26624},    {"bits_per_weight", 3.25}};
  return {{"bytes", 123456}, {"bits_per_weight", 3.25}, {"kinds", io::Json::array({kind})}};
}

io::Json error_of(const std::string& name, double relative) {
  return {{"name", name},
          {"scheme", "kbit3-b32-e4m4"},
          {"sqnr_db", 14.5},
          {"relative_error", relative},
          {"max_error", 0.25}};
}

io::Json check(const char* name, bool passed) {
  return {{"name", name},
          {"passed", passed},
          {"detail", "2 linears"},
          {"faults", io::Json::array()},
          {"verdicts", io::Json::array()}};
}

io::Json verify_report() {
  io::Json weights = check("weights", true), finite = check("finite", false);
  weights["verdicts"].push_back({{"of", concat("SQNR of ", hostile)},
                                 {"value", 14.0078125},
                                 {"limit", 1.7890625},
                                 {"at_least", true},
                                 {"margin", 12.21875},
                                 {"passed", true}});
  finite["faults"].push_back(hostile);
  io::Json tensors = io::Json::array({error_of("model.layers.0.mlp.up_proj", 0.18), error_of(hostile, 0.2)});
  const io::Json model = {{"role", "model"}, {"path", "/x/a<b"}, {"fingerprint", nullptr}};
  return {{"schema", "verify"},
          {"version", 1},
          {"fingerprint", "06deee1eaa82be0fa78e20d1f2a94663"},
          {"weights", {{"tensors", tensors}}},
          {"perplexity", quality()},
          {"sizes", sizes()},
          {"notes", io::Json::array({"a <b>note</b>"})},
          {"passed", false},
          {"checks", io::Json::array({weights, finite})},
          {"provenance", {{"command", "w4q verify 'a<b'"}, {"w4q", "0.1"}, {"models", io::Json::array({model})}}}};
}

io::Json compare_report() {
  io::Json side = sizes();
  side["perplexity"] = quality();
  const io::Json difference = {{"mean", -0.4}, {"error", 0.03}, {"low", -0.46}, {"high", -0.34}};
  return {{"schema", "compare"},
          {"version", 1},
          {"linears",
           {{{"name", "model.layers.0.mlp.up_proj"}, {"a", error_of("", 0.1)}, {"b", error_of("", 0.2)}},
            {{"name", hostile}, {"a", error_of("", 0.3)}, {"b", error_of("", 0.05)}}}},
          {"a", side},
          {"b", side},
          {"nll_difference", difference},
          {"kl_difference", difference},
          {"top1_difference", difference},
          {"verdict", -1}};
}

/// Tags that are not closed in order, and what is neither tag nor escaped; of the whole page.
std::vector<std::string> faults_of(const std::string& html) {
  static const std::set<std::string> alone{"meta", "br", "!DOCTYPE"};
  static const std::regex tag(R"re(^<(/?)([A-Za-z0-9!]+)((?:\s+[A-Za-z0-9-]+(?:="[^"<>]*")?)*)\s*(/?)>)re");
  std::vector<std::string> faults, open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at)) {
    std::smatch found;
    const std::string piece = html.substr(at, 20000);
    if (!std::regex_search(piece, found, tag)) {
      faults.push_back("no tag: " + html.substr(at, 60));
      break;
    }
    at += static_cast<size_t>(found.length());
    const std::string name = found[2];
    if (found[1] == "/") {
      if (open.empty() || open.back() != name) {
        faults.push_back("closes " + name);
        break;
      }
      open.pop_back();
    } else if (found[4] != "/" && !alone.contains(name)) {
      open.push_back(name);
    }
  }
  for (const auto& name : open) faults.push_back("leaves open " + name);
  return faults;
}

io::Json carried(const std::string& html) {
  const std::string begin = "<script type=\"application/json\" id=\"report\">";
  const size_t from = html.find(begin) + begin.size();
  return io::parse_json(html.substr(from, html.find("</script>", from) - from), "page");
}

void numbers_of(const io::Json& json, std::set<std::string>& numbers) {
  if (json.is_number()) numbers.insert(json.dump());
  if (json.is_structured()) {
    for (const auto& item : json) numbers_of(item, numbers);
  }
}

TEST(Page, IsSoundHtmlThatHoldsTheReport) {
  for (const io::Json& report : {verify_report(), compare_report()}) {
    const std::string html = report::html_page(report);
    EXPECT_THAT(faults_of(html), IsEmpty());
    EXPECT_THAT(html, Not(HasSubstr("<script>")));
    EXPECT_THAT(html, Not(HasSubstr("<b>")));
    EXPECT_THAT(html, HasSubstr("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;"));
    EXPECT_THAT(html, HasSubstr("prefers-color-scheme: dark"));
    EXPECT_THAT(html, HasSubstr("name=\"viewport\""));
    EXPECT_THAT(html, Not(HasSubstr("http")));  // nothing is fetched
    EXPECT_THAT(html, Not(ContainsRegex("[^a-z]nan[^a-z]")));
    EXPECT_EQ(carried(html), report);
  }
}

TEST(Page, ShowsNoNumberThatTheReportLacks) {
  static const std::regex data("<data value=\"([^\"]*)\">");
  for (const io::Json& report : {verify_report(), compare_report()}) {
    std::set<std::string> known;
    numbers_of(report, known);
    const std::string html = report::html_page(report);
    std::set<std::string> shown;
    for (std::sregex_iterator at(html.begin(), html.end(), data), end; at != end; ++at) shown.insert((*at)[1]);
    EXPECT_GE(shown.size(), 15u);
    for (const auto& number : shown) EXPECT_TRUE(known.contains(number)) << number;
  }
  const std::string html = report::html_page(verify_report());
  for (const char* number : {"14.0078125", "1.7890625", "12.21875", "0.12345678901", "123456"}) {
    EXPECT_THAT(html, HasSubstr(concat("<data value=\"", number, "\">")));
  }
}

TEST(Page, SaysWhetherItIsVerified) {
  io::Json report = verify_report();
  EXPECT_THAT(report::html_page(report), HasSubstr("FAILED: 1 of 2 checks failed"));
  report["passed"] = true;
  for (auto& check : report["checks"]) check["passed"] = true;
  EXPECT_THAT(report::html_page(report), HasSubstr("verified: all of 2 checks passed"));
  EXPECT_THAT(report::html_page(compare_report()), HasSubstr("B is closer to the base"));
}

/// Rules of statistics ask for more than one number.
TEST(Page, CallsNoNumberAFaultWhereTheCheckHolds) {
  io::Json report = verify_report();
  report["checks"][1]["passed"] = true;
  report["checks"][0]["verdicts"][0]["passed"] = false;
  const std::string held = report::html_page(report);
  EXPECT_THAT(held, HasSubstr("beyond, which alone is no fault"));
  EXPECT_THAT(held, Not(HasSubstr("✗ FAIL</span>")));
  report["checks"][0]["passed"] = false;
  EXPECT_THAT(report::html_page(report), HasSubstr("✗ FAIL</span>"));
}

/// As of a folder whose first check fails, of a model that computes NaN, and of weights compared alone.
TEST(Page, StandsWithoutWhatAReportLacks) {
  const io::Json bare = {{"schema", "verify"}, {"version", 1}, {"passed", false}, {"checks", io::Json::array()}};
  EXPECT_THAT(faults_of(report::html_page(bare)), IsEmpty());
  io::Json broken = verify_report();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  broken["perplexity"]["perplexity"] = nan;
  for (const char* key : {"kl", "kl_max", "ratio"}) broken["perplexity"]["base"][key] = nan;
  for (auto& window : broken["perplexity"]["per_window"]) window["perplexity"] = window["kl"] = nan;
  for (auto& quantile : broken["perplexity"]["base"]["kl_quantiles"]) quantile["kl"] = nan;
  broken["weights"]["tensors"][0]["relative_error"] = nan;
  broken["weights"]["tensors"][1]["relative_error"] = 0;
  const std::string html = report::html_page(broken);
  EXPECT_THAT(faults_of(html), IsEmpty());
  EXPECT_THAT(html, Not(ContainsRegex("[^a-z]nan[^a-z]")));
  io::Json weights = compare_report();
  for (const char* side : {"a", "b"}) weights[side].erase("perplexity");
  weights.erase("verdict");
  EXPECT_THAT(report::html_page(weights), HasSubstr("Compared by weights alone"));
  try {
    report::html_page({{"schema", "inspect"}});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_argument);
  }
}

/// 100 layers of 60 experts, 5000 windows, names of a megabyte.
TEST(Page, StaysSmall) {
  io::Json report = verify_report();
  auto& tensors = report["weights"]["tensors"];
  for (int i = 0; i < 6000; ++i) {
    tensors.push_back(error_of(concat("model.layers.", i / 60, ".mlp.experts.", i % 60, ".up_proj"), 0.1 + i * 1e-5));
  }
  for (int i = 0; i < 5000; ++i) report["perplexity"]["per_window"].push_back(report["perplexity"]["per_window"][0]);
  report["checks"][1]["faults"].push_back(std::string(1'000'000, '<'));
  const std::string html = report::html_page(report);
  EXPECT_LE(html.size(), report::most_page_bytes);
  EXPECT_THAT(faults_of(html), IsEmpty());
  EXPECT_THAT(html, HasSubstr("Left out of the JSON in this page for its size"));
  EXPECT_EQ(carried(html)["sizes"], report["sizes"]);
}

/// The rates of kernels stand beside what reading reaches.
TEST(Page, HasSpeedAndKernels) {
  io::Json report = verify_report();
  const io::Json part = {{"name", "gate_proj<"}, {"launches", 4}, {"bytes", 1000000}, {"seconds", 5e-7}};
  report["speed"] = {{"gpu", "a GPU"},
                     {"read_bandwidth", 4e12},
                     {"prompt_tokens_per_second", 12345.5},
                     {"time_to_first_token", 0.0415},
                     {"tokens_per_second", 321.25},
                     {"step_bytes", 1000000000},
                     {"bandwidth", 3e12},
                     {"share_of_roofline", 0.75},
                     {"launches", 100},
                     {"parts", io::Json::array({part})}};
  const io::Json kernel = {{"name", hostile},     {"scheme", "kbit3-b32-e4m4"}, {"kernels", "gemv"},
                           {"to_fp64", 0.000125}, {"to_cpu", 0.00025},          {"bound", 0.001}};
  report["kernels"] = io::Json::array({kernel});
  const std::string html = report::html_page(report);
  EXPECT_THAT(faults_of(html), IsEmpty());
  EXPECT_THAT(html, HasSubstr("gate_proj&lt;"));
  EXPECT_THAT(html, HasSubstr("2000 GB/s, 50.0 %"));
  EXPECT_THAT(html, HasSubstr("<data value=\"321.25\">321.25</data>"));
  EXPECT_THAT(html, HasSubstr("<data value=\"0.000125\">"));
}

io::Json plan_report() {
  const auto point = [](double bits, double cost) -> io::Json {
    return {{"bits_per_weight", bits}, {"divergence", cost}, {"tensors", {{"3", 2}, {"4<", 1}}}};
  };
  io::Json tensors = io::Json::array();
  for (const auto& [name, bits] : {std::pair{"model.layers.0.mlp.up_proj", 3.28125}, {hostile, 4.28125}}) {
    tensors.push_back({{"name", name}, {"scheme", "kbit3-b32-e4m4"}, {"bits_per_weight", bits}});
  }
  return {{"schema", "plan"},
          {"version", 1},
          {"tensors", tensors},
          {"allocation",
           {{"chosen", point(3.53125, 0.0703125)},
            {"uniform", {point(3.25, 0.140625), point(4.25, 0.03515625)}},
            {"frontier", {point(3.5, 0.078125), point(3.75, 0.0625)}},
            {"measured", true},
            {"seconds", 1.5},
            {"mix",
             {{"windows", 12},
              {"length", 256},
              {"kl", 0.0693359375},
              {"kl_of_neighbours", 0.0751953125},
              {"exchanges_tried", 40},
              {"exchanges_taken", 7}}}}}};
}

/// Any number of models beside each other, bits as they were chosen, speeds: each figure is one of the reports.
TEST(Page, PutsReportsBesideEachOther) {
  std::vector<report::NamedReport> reports;
  for (const char* name : {"two<", "three", "four", "five"}) {
    io::Json report = verify_report();
    report["perplexity"]["perplexity"] = 10.4375 + static_cast<double>(reports.size());
    reports.push_back({name, std::move(report)});
  }
  reports[1].json["passed"] = true;
  reports.push_back({"plan", plan_report()});
  const std::string html = report::joint_page(reports);
  EXPECT_THAT(faults_of(html), IsEmpty());
  for (const char* part :
       {"two&lt;: FAILED", "three: verified", "<h3>five</h3>", "key d", "10.438", "13.438", "Allocation"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  std::set<std::string> known;
  for (const auto& [name, json] : reports) numbers_of(json, known);
  static const std::regex data("<data value=\"([^\"]*)\">");
  for (std::sregex_iterator at(html.begin(), html.end(), data), last; at != last; ++at) {
    EXPECT_TRUE(known.contains((*at)[1])) << (*at)[1];
  }
  const auto held = carried(html);
  ASSERT_EQ(held.size(), reports.size());
  for (size_t i = 0; i < reports.size(); ++i) EXPECT_EQ(held[i], reports[i].json);
}

TEST(Page, ShowsWhatBitsWereChosen) {
  const std::string html = report::joint_page({{"plan", plan_report()}});
  EXPECT_THAT(faults_of(html), IsEmpty());
  for (const char* part : {"the best of each size: 3.75 bits a weight, 0.0625; 2×3 1×4&lt;",
                           "<data value=\"0.0693359375\">", "bits a weight 4.2812", "expected KL, nats"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  EXPECT_EQ(carried(html), plan_report());
}

TEST(Page, RefusesWhatHasNone) {
  const auto refused = [](const std::vector<report::NamedReport>& reports) {
    try {
      report::joint_page(reports);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  io::Json plain = plan_report();
  plain.erase("allocation");
  EXPECT_EQ(refused({{"a", plain}}), ErrorCode::bad_argument);
  EXPECT_EQ(refused({{"a", {{"schema", "clean"}}}}), ErrorCode::bad_argument);
  EXPECT_EQ(refused({{"a", io::Json::array()}}), ErrorCode::bad_argument);
  EXPECT_EQ(refused({{"a", compare_report()}, {"b", verify_report()}}), ErrorCode::bad_argument);
}

/// What is read from a file may be anything: each value of a report in turn is one of another type.
void replace_each(io::Json& part, const std::function<void()>& visit) {
  static const io::Json others[] = {nullptr, 7, -1e300, "text", io::Json::array({1}), {{"k", "v"}}};
  for (const auto& other : others) {
    const io::Json before = std::exchange(part, other);
    visit();
    part = before;
  }
  if (part.is_structured()) {
    for (auto& item : part) replace_each(item, visit);
  }
}

TEST(Page, StandsOrRefusesWhateverTheTypes) {
  int pages = 0;
  for (io::Json report : {verify_report(), compare_report(), plan_report()}) {
    for (auto& [key, value] : report.items()) {
      if (key == "schema") continue;
      replace_each(value, [&] {
        try {
          const std::string html = report::joint_page({{"a", report}});
          if (++pages % 10 == 0) {  // looking takes longer than the page
            EXPECT_THAT(faults_of(html), IsEmpty());
          }
        } catch (const Error& error) {
          EXPECT_NE(error.code(), ErrorCode::internal) << error.what();
        }
      });
    }
  }
  EXPECT_GE(pages, 500);
}

}  // namespace
}  // namespace w4q::test
