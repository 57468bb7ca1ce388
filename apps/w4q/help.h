// How the command line explains itself: groups of options, examples, and one description of every option, from which help,
// man pages and completions are made.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::app {

/// A heading of help, in the order of printing.
struct OptionGroup {
  const char* title;
  bool basic;  ///< printed by --help; the others by --help-all
};

inline constexpr OptionGroup option_groups[] = {
    {"What to make", true}, {"Options", true},  // what an option belongs to unless told otherwise
    {"General", true},      {"Text and windows", false}, {"Scheme", false},   {"What is packed", false},
    {"Steps", false},       {"Calibration", false},      {"Output", false},   {"Checks", false},
    {"Limits", false},      {"Decoding", false},         {"Sampling", false}, {"Speed", false},
};
inline constexpr const char *aim_group = "What to make", *basic_group = "Options", *general_group = "General",
                            *text_group = "Text and windows", *scheme_group = "Scheme",
                            *packed_group = "What is packed", *steps_group = "Steps",
                            *calibration_group = "Calibration", *output_group = "Output", *checks_group = "Checks",
                            *limits_group = "Limits", *decoding_group = "Decoding", *sampling_group = "Sampling",
                            *speed_group = "Speed";

/// Options added to `command` while this lives belong to the group.
class InGroup {
 public:
  InGroup(CLI::App& command, const char* group);
  ~InGroup();
  InGroup(const InGroup&) = delete;
  InGroup& operator=(const InGroup&) = delete;

 private:
  CLI::App& command_;
  const std::string before_;
};

/// A command line, without the leading "w4q", and what it does.
struct Example {
  const char* line;
  const char* what;
};
/// Shown at the end of the command's help and in its man page.
void set_examples(CLI::App& command, const std::vector<Example>& examples);

/// An option as it is told to people.
struct OptionHelp {
  std::vector<std::string> names;  ///< "-o", "--output"
  std::string value;               ///< "FILE", "N", "none|mse"; empty: a flag
  std::vector<std::string> choices;
  std::string text;    ///< what it does, with range and default
  std::string others;  ///< "not with --recipe; needs --chat"; empty: it goes with all
  bool takes_file = false;
  bool optional_value = false;
};
OptionHelp describe_option(const CLI::Option& option);

/// The options of a group, those that are not hidden; and the positional arguments.
std::vector<const CLI::Option*> options_of(const CLI::App& command, std::string_view group);
std::vector<const CLI::Option*> positionals_of(const CLI::App& command);
/// "MODEL".
std::string argument_word(const CLI::Option& argument);
/// The commands that help lists.
std::vector<const CLI::App*> commands_of(const CLI::App& app);

/// Gives the program and all its commands, once they have their options, --help-all and the way that help is printed.
void set_help(CLI::App& app);

}  // namespace w4q::app
