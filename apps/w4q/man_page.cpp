#include "man_page.h"

#include <sstream>

#include "core/error.h"
#include "core/text.h"
#include "help.h"

namespace w4q::app {
namespace {

/// Text that troff prints as it stands: dashes that can be copied, no line that begins with a dot.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
  }
  return result.starts_with('.') || result.starts_with('\'') ? "\\&" + result : result;
}

std::string bold(const std::string& text) { return "\\fB" + escaped(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + escaped(text) + "\\fR"; }

std::string page_name(const CLI::App& app, const CLI::App& command) {
  return &app == &command ? app.get_name() : app.get_name() + "-" + command.get_name();
}

std::string synopsis(const CLI::App& app, const CLI::App& command) {
  std::string text = ".SH SYNOPSIS\n" + bold(app.get_name());
  if (&app == &command) return text + " " + italic("COMMAND") + " …\n";
  text += " " + bold(command.get_name());
  for (const CLI::Option* argument : positionals_of(command)) {
    const std::string word = italic(argument_word(*argument));
    text += argument->get_required() ? " " + word : " [" + word + "]";
  }
  return text + " [" + italic("OPTIONS") + "]\n";
}

std::string option_text(const CLI::Option& option) {
  const OptionHelp help = describe_option(option);
  std::vector<std::string> names;
  for (const auto& name : help.names) names.push_back(bold(name));
  const std::string value = help.value.empty()    ? ""
                            : help.optional_value ? " [" + italic(help.value) + "]"
                                                  : " " + italic(help.value);
  std::string text = concat(".TP\n", join(names), value, "\n", escaped(help.text), ".\n");
  if (!help.others.empty()) text += concat("(", escaped(help.others), ")\n");
  return text;
}

std::string options(const CLI::App& command) {
  std::string text;
  for (const CLI::Option* argument : positionals_of(command)) {
    text += concat(".TP\n", italic(argument_word(*argument)), "\n", escaped(describe_option(*argument).text), ".\n");
  }
  for (const OptionGroup& group : option_groups) {
    const auto members = options_of(command, group.title);
    if (members.empty()) continue;
    text += concat(".SS ", group.title, "\n");
    for (const CLI::Option* option : members) text += option_text(*option);
  }
  return ".SH OPTIONS\n" + text;
}

std::string commands(const CLI::App& app) {
  std::string text = ".SH COMMANDS\n";
  for (const CLI::App* command : commands_of(app)) {
    text += concat(".TP\n", bold(command->get_name()), "\n", escaped(command->get_description()), ".\n");
  }
  return text;
}

/// The lines of the footer (set_examples): a command line, then what it does.
std::string examples(const CLI::App& command) {
  std::istringstream lines(command.get_footer());
  std::string text = ".SH EXAMPLES\n";
  for (std::string line; std::getline(lines, line);) {
    const std::string words = line.substr(line.find_first_not_of(' '));
    text += words.starts_with("w4q ") ? concat(".TP\n", bold(words), "\n") : escaped(words) + ".\n";
  }
  return text;
}

std::string exit_status() {
  std::string text = ".SH EXIT STATUS\n.TP\n0\nFine.\n";
  constexpr ErrorCode codes[] = {ErrorCode::verification_failed, ErrorCode::bad_argument, ErrorCode::bad_file,
                                 ErrorCode::device, ErrorCode::internal};
  for (const ErrorCode code : codes) {
    const ErrorCodeRow& row = describe(code);
    text += concat(".TP\n", row.exit_status, "\n", escaped(std::string(row.sentence)), ".\n");
  }
  return text;
}

std::string see_also(const CLI::App& app, const CLI::App& command) {
  std::vector<std::string> pages;
  if (&app != &command) pages.push_back(bold("w4q") + "(1)");
  for (const CLI::App* other : commands_of(app)) {
    if (other != &command) pages.push_back(bold("w4q-" + other->get_name()) + "(1)");
  }
  return ".SH SEE ALSO\n" + join(pages, ",\n") + "\n";
}

}  // namespace

std::string man_page(const CLI::App& app, const CLI::App& command) {
  const bool whole = &app == &command;
  const std::string name = page_name(app, command);
  std::string text = concat(".TH ", escaped(name), " 1 \"\" \"w4q " W4Q_VERSION "\" \"User Commands\"\n.SH NAME\n",
                            escaped(name), " \\- ", escaped(command.get_description()), "\n", synopsis(app, command));
  if (whole) text += commands(app);
  text += options(command);
  if (!command.get_footer().empty()) text += examples(command);
  if (whole) text += exit_status();
  return text + see_also(app, command);
}

}  // namespace w4q::app
