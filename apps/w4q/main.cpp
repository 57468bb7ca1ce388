// w4q: quantize → repack → verify.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "commands.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/terminal.h"
#include "devices.h"
#include "io/lost_pages.h"
#include "io/partial.h"
#include "ranks/ranks.h"

namespace {

using namespace w4q;

int report(const Error& error) {
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

std::atomic<bool> partials_taken{false};

/// Runs the action and turns every exception into what it means for the run.
ranks::Ending ending_of(const app::Action& action) {
  try {
    const int status = action();
    std::cout.flush();
    if (const auto changed = io::changed_input()) return {.error = *changed};
    if (!std::cout) return {.error = Error(ErrorCode::bad_file, "stdout: the results could not be written")};
    return {.status = status};
  } catch (const Interrupted& interrupted) {
    return {.signal = interrupted.signal()};
  } catch (const ranks::Stopped&) {
    return {.stopped = true};
  } catch (const std::exception&) {
    // What a signal took away (last_words) is missed by whatever works still.
    if (const int signal = noted_interrupt(); signal != 0 && partials_taken) return {.signal = signal};
    return {.error = app::error_in_flight()};
  }
}

/// One message, and the exit status of its kind.
int conclude(const ranks::Ending& ending) {
  if (ending.error) return report(*ending.error);
  if (ending.signal != 0) std::cerr << "\ninterrupted; nothing was written" << app::kept_for_resume() << "\n";
  return ending.signal != 0 ? 128 + ending.signal : ending.status;
}

/// Of a rank whose launcher will not wait for its work: nothing comes to its place any more, which is said before the rest
/// is removed.
void last_words(const ranks::Ending& ending, bool tells) {
  partials_taken = true;
  io::TakenPartials taken;
  if (tells) conclude(ending);
  taken.remove();
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write(), with a message, not a death

  // What all ranks find before any work is told by one of them.
  const auto tells = [] {
    const auto launched = ranks::launched();
    return !launched || launched->rank == 0;
  };
  const auto refuse = [&](const Error& error) {
    if (tells()) return report(error);
    // A launcher ends all once one has ended with a bad status: the one that tells goes first.
    std::this_thread::sleep_for(std::chrono::seconds(2));
    return describe(error.code()).exit_status;
  };
  app::Action action;
  const auto program = app::make_program(action);
  try {
    program->parse(argc, argv);
  } catch (const CLI::Success& request) {
    return tells() ? program->exit(request) : 0;  // --help, --version
  } catch (const CLI::ParseError& error) {
    return refuse(app::wrong_command_line(*program, error));
  }
  restart_with_short_spinning(argv);
  app::remember_command(argc, argv);
  try {
    const std::string command = program->get_subcommands().front()->get_name();
    app::make_ranks(*program);
    if (!app::shares_work(command)) app::require_one_process(command);
    ranks::set_last_words(last_words);
    watch_for_interrupts();
    io::survive_lost_pages();
    ranks::start();
  } catch (const Error& error) {
    return refuse(error);
  }
  const app::Action work = [&] {
    app::take_device(*program);
    return action();
  };
  int signal = 0;
  const int status = ranks::end_together(ending_of(work), [&](const ranks::Ending& ending) {
    signal = ending.signal;
    return conclude(ending);
  });
  if (signal != 0) end_by_signal(signal);
  return status;
}
