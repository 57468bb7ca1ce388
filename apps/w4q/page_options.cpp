#include "page_options.h"

#include "checkpoint/digests.h"
#include "core/error.h"
#include "core/text.h"
#include "io/output.h"
#include "report/page.h"

namespace w4q::app {
namespace {

/// As a shell would have to be told.
std::string quoted(const std::string& word) {
  constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string result = "'";
  for (const char c : word) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result + "'";
}

io::Json stated_fingerprint(const std::filesystem::path& folder) {
  try {
    const auto digests = checkpoint::read_digests(folder);
    return digests ? io::Json(digests->fingerprint().text()) : io::Json();
  } catch (const Error&) {
    return {};  // the check of digests says what is wrong with them
  }
}

}  // namespace

void add_page(CLI::App& command, PageOptions& options) {
  const InGroup group(command, output_group);
  command.add_option("--html", options.file, "Write the report as a page too: one file, to be opened in a browser")
      ->type_name("FILE");
  command.add_flag("--overwrite", options.overwrite, "Replace the page if it exists; never an input");
}

void check(const PageOptions& options, const std::vector<std::filesystem::path>& inputs) {
  if (options.overwrite && options.file.empty()) {
    throw Error(ErrorCode::bad_argument, "--overwrite belongs to --html").hint("--html report.html");
  }
  if (!options.file.empty() && ranks::world().first()) io::check_writable(options.file, options.overwrite, inputs);
}

io::Json provenance(const std::vector<ReportedModel>& models) {
  io::Json rows = io::Json::array();
  for (const auto& [role, path] : models) {
    rows.push_back({{"role", role}, {"path", path.native()}, {"fingerprint", stated_fingerprint(path)}});
  }
  std::string line = "w4q";
  for (const auto& word : command_words()) line += " " + quoted(word);
  return {{"command", line}, {"w4q", W4Q_VERSION}, {"models", std::move(rows)}};
}

void print_and_write(const CommonOptions& options, const PageOptions& page, const JsonSchema& schema,
                     const std::string& text, const io::Json& json, const std::vector<std::filesystem::path>& inputs) {
  print(options, schema, text, json);
  if (page.file.empty() || !ranks::world().first()) return;
  io::write_file(page.file, report::html_page(with_schema(schema, json)), page.overwrite, inputs);
}

}  // namespace w4q::app
