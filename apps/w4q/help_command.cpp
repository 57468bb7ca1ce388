// w4q help [COMMAND] [--man | --completion SHELL | --files FOLDER]: not listed itself, for packages and for those who try.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include "common_options.h"
#include "completions.h"
#include "core/error.h"
#include "core/text.h"
#include "io/system.h"
#include "man_page.h"

namespace w4q::app {
namespace {

struct HelpOptions {
  std::string command;
  std::string shell;
  std::string folder;
  bool man = false;
};

const CLI::App& command_of(const CLI::App& app, const std::string& name) {
  if (name.empty()) return app;
  for (const CLI::App* command : commands_of(app)) {
    if (command->get_name() == name) return *command;
  }
  throw Error(ErrorCode::bad_argument, concat(printable(name), ": no such command")).hint("w4q --help lists them");
}

std::string completion(const CLI::App& app, const std::string& shell) {
  return shell == "bash" ? bash_completion(app) : shell == "zsh" ? zsh_completion(app) : fish_completion(app);
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (!file) throw io::system_error(path, "cannot be written");
}

/// Where Debian looks for each below /usr/share.
void write_all(const CLI::App& app, const std::filesystem::path& share) {
  write(share / "man/man1/w4q.1", man_page(app, app));
  for (const CLI::App* command : commands_of(app)) {
    write(share / "man/man1" / ("w4q-" + command->get_name() + ".1"), man_page(app, *command));
  }
  write(share / "bash-completion/completions/w4q", bash_completion(app));
  write(share / "zsh/vendor-completions/_w4q", zsh_completion(app));
  write(share / "fish/vendor_completions.d/w4q.fish", fish_completion(app));
}

int run(const CLI::App& app, const HelpOptions& options) {
  const CLI::App& command = command_of(app, options.command);
  if (!options.folder.empty()) {
    write_all(app, options.folder);
  } else if (options.man) {
    std::cout << man_page(app, command);
  } else if (!options.shell.empty()) {
    std::cout << completion(app, options.shell);
  } else {
    const auto name = &command == &app ? app.get_name() : app.get_name() + " " + command.get_name();
    std::cout << app.get_formatter()->make_help(&command, name, CLI::AppFormatMode::All);
  }
  return 0;
}

}  // namespace

void setup_help(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("help", "Help, man pages and completions")->group("");
  auto options = std::make_shared<HelpOptions>();
  command->add_option("command", options->command, "A command, or nothing for the program");
  auto* man = command->add_flag("--man", options->man, "Print the man page");
  auto* shell = command->add_option("--completion", options->shell, "Print the completion for a shell")
                    ->check(CLI::IsMember({"bash", "zsh", "fish"}))
                    ->excludes(man);
  command->add_option("--files", options->folder, "Write all man pages and completions below this folder")
      ->type_name("FOLDER")
      ->excludes(man)
      ->excludes(shell);
  command->callback([&app, &action, options] { action = [&app, options] { return run(app, *options); }; });
}

}  // namespace w4q::app
