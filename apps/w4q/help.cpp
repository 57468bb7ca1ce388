#include "help.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <sstream>

#include "core/error.h"
#include "core/terminal.h"
#include "core/text.h"

namespace w4q::app {
namespace {

constexpr size_t line_width = 100, text_column = 30;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

/// "INT:INT in [2 - 8]" → "INT", "INT in [2 - 8]"; what stands in braces is one part.
std::vector<std::string> parts_of_type(const std::string& type) {
  const size_t brace = type.find('{');
  auto parts = split(type.substr(0, brace), ':');
  if (brace != std::string::npos) parts.push_back(type.substr(brace));
  return parts;
}

/// "INT in [2 - 8]" → "2 to 8"; empty: no range.
std::string range_of(const std::string& part) {
  const size_t open = part.find("in ["), close = part.find(']'), middle = part.find(" - ");
  if (open == std::string::npos || close == std::string::npos || middle == std::string::npos) return {};
  return concat(part.substr(open + 4, middle - open - 4), " to ", part.substr(middle + 3, close - middle - 3));
}

std::string word_of(const std::string& type) {
  return type == "INT" || type == "UINT" ? "N" : type == "FLOAT" ? "X" : type;
}

/// The first name of each.
std::string names_of(const std::set<CLI::Option*>& options) {
  std::vector<std::string> names;
  for (const CLI::Option* option : options)
    names.push_back(option->get_positional() ? argument_word(*option) : option->get_name());
  std::ranges::sort(names);
  return join(names, " ");
}

/// `text` in lines of what is left of line_width behind `column`, the first of which the caller has begun.
std::string wrapped(const std::string& text, size_t column) {
  std::string result;
  size_t used = column;
  for (const auto& word : split(text, ' ')) {
    const size_t width = display_width(word);
    if (used > column && used + 1 + width > line_width) {
      result += "\n" + std::string(column, ' ');
      used = column;
    }
    if (used > column) result += ' ', ++used;
    result += word;
    used += width;
  }
  return result + "\n";
}

std::string entry(const std::string& name, const std::string& text) {
  const std::string left = "  " + name;
  const bool fits = display_width(left) + 2 <= text_column;
  return left + (fits ? std::string(text_column - display_width(left), ' ') : "\n" + std::string(text_column, ' ')) +
         wrapped(text, text_column);
}

std::string option_entry(const CLI::Option& option, bool everything) {
  const OptionHelp help = describe_option(option);
  const std::string value = help.value.empty() ? "" : help.optional_value ? " [" + help.value + "]" : " " + help.value;
  const bool others = everything && !help.others.empty();
  return entry(join(help.names, ", ") + value, others ? concat(help.text, " [", help.others, "]") : help.text);
}

std::string usage(const CLI::App& app, const std::string& name) {
  std::string line = concat("Usage: ", name);
  if (!commands_of(app).empty()) return line + " COMMAND …\n";
  for (const CLI::Option* argument : positionals_of(app)) {
    const std::string word = argument_word(*argument);
    line += argument->get_required() ? " " + word : concat(" [", word, "]");
  }
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_required() || option->get_positional()) continue;
    const OptionHelp help = describe_option(*option);
    line += concat(" ", help.names.front(), " ", help.value);
  }
  return line + " [OPTIONS]\n";
}

std::string groups_text(const CLI::App& app, bool everything) {
  std::string text;
  std::vector<std::string> hidden;
  for (const OptionGroup& group : option_groups) {
    const auto options = options_of(app, group.title);
    if (options.empty()) continue;
    if (!everything && !group.basic) {
      hidden.emplace_back(group.title);
      continue;
    }
    text += concat("\n", group.title, ":\n");
    for (const CLI::Option* option : options) text += option_entry(*option, everything);
  }
  if (hidden.empty()) return text;
  return text + "\n" + wrapped(concat("More with --help-all: ", join(hidden), "."), 0);
}

/// The only formatter of this program.
class Formatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = wrapped(app->get_description() + ".", 0) + "\n" + usage(*app, name);
    for (const CLI::Option* argument : positionals_of(*app)) {
      text += entry(argument_word(*argument), describe_option(*argument).text);
    }
    const auto commands = commands_of(*app);
    if (!commands.empty()) text += "\nCommands:\n";
    for (const CLI::App* command : commands) text += entry(command->get_name(), command->get_description());
    text += groups_text(*app, mode != CLI::AppFormatMode::Normal);
    if (!app->get_footer().empty()) text += "\nExamples:\n" + app->get_footer();
    return text;
  }
};

/// A group that option_groups lacks would be printed by nobody.
void check_groups(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const bool known = option->get_group().empty() || std::ranges::any_of(option_groups, [&](const auto& group) {
                         return group.title == option->get_group();
                       });
    ensure(known, concat(command.get_name(), " ", option->get_name(), ": no group ", option->get_group()));
  }
}

}  // namespace

InGroup::InGroup(CLI::App& command, const char* group)
    : command_(command), before_(command.option_defaults()->get_group()) {
  command_.option_defaults()->group(group);
}

InGroup::~InGroup() { command_.option_defaults()->group(before_); }

void set_examples(CLI::App& command, const std::vector<Example>& examples) {
  std::string text;
  for (const Example& example : examples) text += concat("  w4q ", example.line, "\n      ", example.what, "\n");
  command.footer(text);
}

OptionHelp describe_option(const CLI::Option& option) {
  OptionHelp help;
  for (const auto& name : option.get_snames()) help.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) help.names.push_back("--" + name);
  std::string range, text = option.get_description();
  for (const auto& part : parts_of_type(option.get_type_name())) {
    if (part.starts_with('{')) {
      help.choices = split(part.substr(1, part.size() - 2), ',');
      help.value = join(help.choices, "|");
    } else if (help.value.empty() || part == "SIZE") {
      help.value = word_of(part);
    }
    if (range.empty()) range = part == "POSITIVE" ? "more than 0" : range_of(part);
  }
  if (option.get_items_expected_max() == 0) help.value.clear();
  help.takes_file = help.value == "TEXT" || help.value == "FILE" || help.value == "FOLDER";
  help.optional_value = !help.value.empty() && option.get_items_expected_min() == 0;
  const std::string usual =
      help.value.empty() || option.get_default_str().empty() ? "" : "default " + option.get_default_str();
  if (!range.empty() || !usual.empty())
    text += concat(" (", range, !range.empty() && !usual.empty() ? "; " : "", usual, ")");
  help.text = text;
  const std::string excludes = names_of(option.get_excludes()), needs = names_of(option.get_needs());
  help.others = concat(needs.empty() ? "" : "with " + needs, needs.empty() || excludes.empty() ? "" : "; ",
                       excludes.empty() ? "" : "not with " + excludes);
  return help;
}

std::vector<const CLI::Option*> options_of(const CLI::App& command, std::string_view group) {
  return command.get_options(
      [&](const CLI::Option* option) { return option->nonpositional() && option->get_group() == group; });
}

std::vector<const CLI::Option*> positionals_of(const CLI::App& command) {
  return command.get_options([](const CLI::Option* option) { return option->get_positional(); });
}

std::string argument_word(const CLI::Option& argument) {
  std::string word = argument.get_name(true);
  std::ranges::transform(word, word.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return word;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
}

void set_help(CLI::App& app) {
  app.formatter(std::make_shared<Formatter>());
  auto programs = app.get_subcommands([](CLI::App*) { return true; });
  programs.insert(programs.begin(), &app);
  for (CLI::App* program : programs) {
    program->formatter(app.get_formatter());
    program->set_help_flag("-h,--help", "Print the options that are used most, and exit")->group(general_group);
    program->set_help_all_flag("--help-all", "Print all options, and exit")->group(general_group);
    check_groups(*program);
  }
}

}  // namespace w4q::app
