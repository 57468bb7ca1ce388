// --for on commands that write: what programs would say of the output, before there is one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common_options.h"
#include "serving/prediction.h"

namespace w4q::app {

struct ServingArguments {
  std::vector<std::string> programs;  ///< as --for was given
  bool anyway = false;                ///< write it even where one does not load it

  bool empty() const noexcept { return programs.empty(); }
};
/// --for and --even-if-refused.
void add_serving(CLI::App& command, ServingArguments& arguments);
/// Throws bad_argument for names that there are not, and for --even-if-refused alone.
void check(const ServingArguments& arguments);

/// What the programs that were asked for would say of it.
std::vector<serving::Prediction> predict(const ServingArguments& arguments, const serving::StoredModel& planned);
/// Whether all of them load it and compute what it holds.
bool all_load(const std::vector<serving::Prediction>& predictions);
/// Lines for a report: verdicts and findings.
std::vector<std::string> notes_of(const std::vector<serving::Prediction>& predictions);

/// Puts what the programs say behind a report's own notes, which say the same of all programs once.
void add_served(const std::vector<std::string>& served, std::vector<std::string>& notes);

/// Whether one of the programs loads GGUF files and no folders.
bool wants_file(const ServingArguments& arguments);

/// predict() of what would be written as `to`. Throws unsupported, unless --even-if-refused, where a program does not
/// load it, with the dialects that hold the same codes and load in all of them.
std::vector<serving::Prediction> require_served(
    const ServingArguments& arguments, const std::string& to,
    const std::function<serving::StoredModel(const std::string& to)>& planned);
/// The same of a file, which has no dialects.
std::vector<serving::Prediction> require_served(const ServingArguments& arguments, const std::string& to,
                                                const serving::StoredModel& file);
/// The first dialect that holds the codes and loads in all programs: what --to is where it was left out.
/// Throws unsupported where there is none.
std::string served_dialect(const ServingArguments& arguments,
                           const std::function<serving::StoredModel(const std::string& to)>& planned);

struct ServedChoice {
  std::string scheme, to;
};
/// The first of the schemes that a dialect, of all or the given one, holds and all programs load. Throws unsupported
/// where there is none.
ServedChoice served_scheme(
    const ServingArguments& arguments, const std::vector<std::string>& schemes, const std::string& to,
    const std::function<serving::StoredModel(const std::string& scheme, const std::string& to)>& planned);

}  // namespace w4q::app
