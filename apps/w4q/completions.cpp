#include "completions.h"

#include <algorithm>
#include <vector>

#include "core/text.h"
#include "help.h"

namespace w4q::app {
namespace {

std::vector<OptionHelp> all_options(const CLI::App& command) {
  std::vector<OptionHelp> result;
  for (const OptionGroup& group : option_groups) {
    for (const CLI::Option* option : options_of(command, group.title)) result.push_back(describe_option(*option));
  }
  return result;
}

/// Words to choose from, without those that stand for others ("cuda:N").
std::vector<std::string> choices_of(const OptionHelp& option) {
  std::vector<std::string> words;
  std::ranges::copy_if(option.choices, std::back_inserter(words),
                       [](const std::string& word) { return word.find("N") == std::string::npos; });
  return words;
}

/// For single quotes.
std::string quoted(std::string text) {
  for (size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 4) text.replace(at, 1, "'\\''");
  return "'" + text + "'";
}

/// One line, without what zsh takes for its own: brackets and colons.
std::string plain(std::string text) {
  std::ranges::replace(text, '[', '(');
  std::ranges::replace(text, ']', ')');
  std::ranges::replace(text, ':', ',');
  return text;
}

std::vector<std::string> names_of(const std::vector<const CLI::App*>& commands) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands) names.push_back(command->get_name());
  return names;
}

std::string bash_command(const CLI::App& command) {
  std::vector<std::string> words;
  std::string values;
  for (const OptionHelp& option : all_options(command)) {
    words.insert(words.end(), option.names.begin(), option.names.end());
    const auto choices = choices_of(option);
    if (option.value.empty() || option.optional_value) continue;
    const std::string reply = !choices.empty()    ? concat("words=\"", join(choices, " "), "\"")
                              : option.takes_file ? std::string("words=FILES")
                                                  : std::string("words=NONE");
    values += concat("        ", join(option.names, "|"), ") ", reply, " ;;\n");
  }
  return concat("    ", command.get_name(), ")\n      options=\"", join(words, " "), "\"\n      case $previous in\n",
                values, "      esac\n      ;;\n");
}

/// The program's own options, which stand before the command.
std::string program_words(const CLI::App& app) {
  std::vector<std::string> words;
  for (const OptionHelp& option : all_options(app)) words.insert(words.end(), option.names.begin(), option.names.end());
  return join(words, " ");
}

std::string zsh_option(const OptionHelp& option) {
  const auto choices = choices_of(option);
  const std::string action = !choices.empty()       ? concat(":value:(", join(choices, " "), ")")
                             : option.value.empty() ? std::string()
                             : option.takes_file    ? std::string(":file:_files")
                                                    : concat(":", option.value, ": ");
  std::string lines;
  for (const auto& name : option.names) {
    lines += concat("        ",
                    quoted(concat("*", name, "[", plain(option.text), "]", option.optional_value ? ":" : "", action)),
                    " \\\n");
  }
  return lines;
}

std::string fish_option(const std::string& command, const OptionHelp& option) {
  std::string line = concat("complete -c w4q -n ", quoted("__fish_seen_subcommand_from " + command));
  for (const auto& name : option.names)
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  const auto choices = choices_of(option);
  if (!option.value.empty() && !option.optional_value)
    line += !choices.empty() ? concat(" -xa ", quoted(join(choices, " "))) : option.takes_file ? " -rF" : " -x";
  return concat(line, " -d ", quoted(option.text), "\n");
}

}  // namespace

std::string bash_completion(const CLI::App& app) {
  std::string cases;
  for (const CLI::App* command : commands_of(app)) cases += bash_command(*command);
  return concat(R"(# bash completion of w4q, written by `w4q help --completion bash`
_w4q() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} options= words=
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W ")",
                join(names_of(commands_of(app)), " "), " ", program_words(app), R"(" -- "$current"))
    return
  fi
  case ${COMP_WORDS[1]} in
)",
                cases, R"(    *) return ;;
  esac
  compopt +o default 2>/dev/null
  if [[ $words == NONE ]]; then
    COMPREPLY=()
  elif [[ -n $words && $words != FILES ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  elif [[ -z $words && $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}
complete -F _w4q w4q
)");
}

std::string zsh_completion(const CLI::App& app) {
  std::string list, cases;
  for (const CLI::App* command : commands_of(app)) {
    list += concat("    ", quoted(command->get_name() + ":" + plain(command->get_description())), "\n");
    cases += concat("    ", command->get_name(), ")\n      _arguments \\\n");
    for (const OptionHelp& option : all_options(*command)) cases += zsh_option(option);
    cases += "        '*:file:_files'\n      ;;\n";
  }
  return concat(
      "#compdef w4q\n# zsh completion of w4q, written by `w4q help --completion zsh`\n_w4q() {\n  local -a "
      "commands=(\n",
      list, R"(  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command=${words[2]}
  shift words
  (( CURRENT-- ))
  case $command in
)",
      cases, "  esac\n}\n_w4q \"$@\"\n");
}

std::string fish_completion(const CLI::App& app) {
  std::string text = "# fish completion of w4q, written by `w4q help --completion fish`\n";
  for (const OptionHelp& option : all_options(app)) {
    text += "complete -c w4q -n __fish_use_subcommand";
    for (const auto& name : option.names)
      text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    text += concat(" -d ", quoted(option.text), "\n");
  }
  for (const CLI::App* command : commands_of(app)) {
    text += concat("complete -c w4q -n __fish_use_subcommand -fa ", command->get_name(), " -d ",
                   quoted(command->get_description()), "\n");
  }
  for (const CLI::App* command : commands_of(app)) {
    for (const OptionHelp& option : all_options(*command)) text += fish_option(command->get_name(), option);
  }
  return text;
}

}  // namespace w4q::app
