// --html: the report as a page, beside what is printed; and where a report comes from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common_options.h"

namespace w4q::app {

struct PageOptions {
  std::string file;  ///< empty: none
  bool overwrite = false;
};
/// --html and --overwrite.
void add_page(CLI::App& command, PageOptions& options);
/// Throws what writing it would, as far as that is known before the work; `inputs` are never replaced.
void check(const PageOptions& options, const std::vector<std::filesystem::path>& inputs);

/// A checkpoint of a report, and what it is there: "model", "base", "a".
using ReportedModel = std::pair<std::string, std::filesystem::path>;
/// The command line, the program's version, and what stands beside each model as the fingerprint that it was written with.
io::Json provenance(const std::vector<ReportedModel>& models);

/// print(), and the page where one was asked for.
void print_and_write(const CommonOptions& options, const PageOptions& page, const JsonSchema& schema,
                     const std::string& text, const io::Json& json, const std::vector<std::filesystem::path>& inputs);

}  // namespace w4q::app
