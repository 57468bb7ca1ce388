#include "commands.h"

#include <algorithm>
#include <filesystem>
#include <new>

#include "core/text.h"
#include "io/lost_pages.h"
#include "io/system.h"

namespace w4q::app {
namespace {

Error translated() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::filesystem::filesystem_error& error) {
    return io::system_error(error.path1(), "cannot be read", error.code().value());
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::bad_file, "out of memory").hint("--dry-run shows what a command needs");
  } catch (const std::exception& error) {
    return Error(ErrorCode::internal, error.what()).hint("this is a bug in w4q, please report it");
  }
}

/// "did you mean NAME? ", the one of names that is most like `word`; nothing where more than a third of it is another.
std::string suggestion(std::string_view word, const std::vector<std::string>& names) {
  const auto alike = [&](const std::string& name) { return likeness(word, name); };
  const auto nearest = std::ranges::max_element(names, {}, alike);
  if (nearest == names.end() || 3 * alike(*nearest) < 2 * std::max(word.size(), nearest->size())) return {};
  return concat("did you mean ", *nearest, "? ");
}

std::vector<std::string> command_names(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::App* command : program.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

}  // namespace

std::unique_ptr<CLI::App> make_program(Action& action) {
  auto program = std::make_unique<CLI::App>(
      "w4q quantizes LLM checkpoints to 2 to 5 bits a weight, lays the bits out for GPU kernels, and proves that "
      "nothing "
      "broke",
      "w4q");
  CLI::App& app = *program;
  app.set_version_flag("--version", "w4q " W4Q_VERSION, "Print the version, and exit")->group(general_group);
  app.require_subcommand(1);
  setup_quantize(app, action);
  setup_calibrate(app, action);
  setup_repack(app, action);
  setup_verify(app, action);
  setup_compare(app, action);
  setup_report(app, action);
  setup_inspect(app, action);
  setup_hash(app, action);
  setup_clean(app, action);
  setup_list(app, action);
  setup_tokenize(app, action);
  setup_generate(app, action);
  setup_bench(app, action);
  setup_doctor(app, action);
  setup_help(app, action);
  set_examples(app, {{"quantize MODEL -o OUT --quality good", "MODEL is a Hugging Face folder"},
                     {"repack OUT -o OUT2 --target sm89", "laid out for the kernels of an RTX 4090"},
                     {"verify OUT2 --base MODEL --ppl text.txt", "proves it, and measures it against the base"}});
  set_help(app);
  return program;
}

bool shares_work(std::string_view command) {
  constexpr std::string_view shared[] = {"quantize", "repack", "calibrate", "verify", "compare", "generate"};
  return std::ranges::count(shared, command) > 0;
}

Error wrong_command_line(const CLI::App& program, const CLI::ParseError& error) {
  const auto commands = program.get_subcommands();
  const auto first_left = [&](const CLI::App& app, bool option) {
    const auto left = app.remaining(true);
    const auto found = std::ranges::find_if(left, [&](const auto& word) { return word.starts_with("-") == option; });
    return found == left.end() ? std::string() : *found;
  };
  if (commands.empty()) {
    const std::string word = first_left(program, false);
    if (word.empty()) return Error(ErrorCode::bad_argument, error.what()).hint("w4q --help");
    return Error(ErrorCode::bad_argument, concat("no command ", printable(word)))
        .hint(suggestion(word, command_names(program)) + "w4q --help lists them");
  }
  const CLI::App& command = *commands.front();
  const std::string help = concat("w4q ", command.get_name(), " --help");
  const std::string left = first_left(command, true), word = left.substr(0, left.find('='));
  if (word.empty()) return Error(ErrorCode::bad_argument, error.what()).hint(help);
  return Error(ErrorCode::bad_argument, concat(command.get_name(), " has no option ", printable(word)))
      .hint(suggestion(word, option_names(command)) + help);
}

Error error_in_flight() {
  const Error error = translated();
  return io::changed_input().value_or(error);
}

}  // namespace w4q::app
