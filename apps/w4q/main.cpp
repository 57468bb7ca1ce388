// w4q: quantize → repack → verify.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <new>

#include "common_options.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/terminal.h"
#include "io/lost_pages.h"
#include "io/system.h"
#include "page_options.h"

namespace {

using namespace w4q;

/// An input that changed while it was read is the reason of whatever else went wrong after that.
int report(const Error& first) {
  const Error error = io::changed_input().value_or(first);
  std::cout.flush();
  std::cerr << (takes_colours(STDERR_FILENO) ? in_colour(Colour::red, "error:") : "error:") << " " << error.what()
            << "\n";
  return describe(error.code()).exit_status;
}

/// A standard stream that was closed would be the number of the next file that is opened, and progress would be written
/// into an output. Nothing can be written to the one that takes the place of stdout, so that lost results are noticed.
void occupy_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    ::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY);  // gets the lowest free number: this one
  }
}

/// By default libgomp's threads spin for about a millisecond at the end of every parallel loop. On a machine that does
/// other work too that makes a decode 20 times slower (two busy cores: 2.8 s against 0.14 s, 2026-11-20); a short spin
/// still bridges the gaps between the loops of a layer. libgomp reads its variables when it is loaded, so the program
/// starts itself again with one set. A user's own choice stays, and where the restart fails the work goes on as it is.
void restart_with_short_spinning(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  ::setenv("GOMP_SPINCOUNT", "1000", 1);
  ::execv("/proc/self/exe", argv);
}

/// Runs the action and turns every exception into one message and the exit status of its kind.
int run_guarded(const app::Action& action) {
  try {
    const int status = action();
    std::cout.flush();
    if (const auto changed = io::changed_input()) return report(*changed);
    if (!std::cout) return report(Error(ErrorCode::bad_file, "stdout: the results could not be written"));
    return status;
  } catch (const Interrupted& interrupted) {
    std::cerr << "\ninterrupted; nothing was written\n";
    end_by_signal(interrupted.signal());
  } catch (const Error& error) {
    return report(error);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(io::system_error(error.path1(), "cannot be read", error.code().value()));
  } catch (const std::bad_alloc&) {
    return report(Error(ErrorCode::bad_file, "out of memory").hint("--dry-run shows what a command needs"));
  } catch (const std::exception& error) {
    return report(Error(ErrorCode::internal, error.what()).hint("this is a bug in w4q, please report it"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write(), with a message, not a death

  CLI::App app{
      "w4q quantizes LLM checkpoints to 2 to 5 bits a weight, lays the bits out for GPU kernels, and proves that "
      "nothing "
      "broke",
      "w4q"};
  app.set_version_flag("--version", "w4q " W4Q_VERSION, "Print the version, and exit")->group(app::general_group);
  app.require_subcommand(1);
  app::Action action;
  app::setup_quantize(app, action);
  app::setup_calibrate(app, action);
  app::setup_repack(app, action);
  app::setup_verify(app, action);
  app::setup_compare(app, action);
  app::setup_inspect(app, action);
  app::setup_hash(app, action);
  app::setup_clean(app, action);
  app::setup_list(app, action);
  app::setup_tokenize(app, action);
  app::setup_generate(app, action);
  app::setup_bench(app, action);
  app::setup_doctor(app, action);
  app::setup_help(app, action);
  app::set_examples(app, {{"quantize MODEL -o OUT --quality good", "MODEL is a Hugging Face folder"},
                          {"repack OUT -o OUT2 --target sm89", "laid out for the kernels of an RTX 4090"},
                          {"verify OUT2 --base MODEL --ppl text.txt", "proves it, and measures it against the base"}});
  app::set_help(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {
    return app.exit(request);  // --help, --version
  } catch (const CLI::ParseError& error) {
    const auto commands = app.get_subcommands();
    return report(Error(ErrorCode::bad_argument, error.what())
                      .hint(commands.empty() ? "w4q --help" : "w4q " + commands.front()->get_name() + " --help"));
  }
  restart_with_short_spinning(argv);
  app::remember_command(argc, argv);
  watch_for_interrupts();
  io::survive_lost_pages();
  return run_guarded(action);
}
