// w4q report REPORT.json… --html FILE
#include <algorithm>
#include <memory>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "io/output.h"
#include "page_options.h"
#include "report/page.h"

namespace w4q::app {
namespace {

/// What verify says of a mixture with thousands of experts.
constexpr int64_t most_report_bytes = 64'000'000;

struct ReportOptions {
  CommonOptions common;
  PageOptions page;
  std::vector<std::string> files;
};

/// The names of `files` without what all have in common: their folders, ".json".
std::vector<std::string> short_names(const std::vector<std::string>& files) {
  std::vector<std::string> names;
  for (const auto& file : files) names.push_back(std::filesystem::path(file).stem().native());
  auto sorted = names;
  std::ranges::sort(sorted);
  return std::ranges::adjacent_find(sorted) == sorted.end() ? names : files;
}

int run(const ReportOptions& options) {
  apply(options.common);
  if (options.page.file.empty()) {
    throw Error(ErrorCode::bad_argument, "report: where the page is to be written is missing").hint("--html FILE");
  }
  const std::vector<std::filesystem::path> inputs(options.files.begin(), options.files.end());
  check(options.page, inputs);
  const auto names = short_names(options.files);
  std::vector<report::NamedReport> reports;
  io::Json rows = io::Json::array();
  for (size_t i = 0; i < inputs.size(); ++i) {
    reports.push_back({names[i], io::read_json(inputs[i], most_report_bytes)});
    rows.push_back({{"path", options.files[i]}, {"name", names[i]}});
  }
  const std::string html = report::joint_page(reports);
  for (size_t i = 0; i < reports.size(); ++i) rows[i]["report"] = reports[i].json["schema"];
  io::write_file(options.page.file, html, options.page.overwrite, inputs);
  print(options.common, schema::report,
        concat(printable(options.page.file), ": ", reports.size(), reports.size() == 1 ? " report, " : " reports, ",
               human_bytes(static_cast<int64_t>(html.size())), "\n"),
        {{"page", options.page.file}, {"bytes", html.size()}, {"reports", std::move(rows)}});
  return 0;
}

}  // namespace

void setup_report(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("report", "Put reports of other commands on one page, side by side");
  auto options = std::make_shared<ReportOptions>();
  command
      ->add_option("reports", options->files,
                   "What verify, compare, bench, or quantize with --target-bpw or --target-size printed with --json")
      ->required();
  add_page(*command, options->page);
  add_common(*command, options->common);
  set_examples(*command,
               {{"report 3.json 4.json 5.json --html page.html", "three models beside each other, of verify --json"},
                {"report quantize.json verify.json --html page.html",
                 "where --target-bpw put the bits, and what became of it"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
