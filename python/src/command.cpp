#include "command.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "commands.h"
#include "core/interrupt.h"
#include "core/progress.h"
#include "devices.h"
#include "io/lost_pages.h"
#include "page_options.h"

namespace w4q::python {
namespace {

namespace nb = nanobind;

/// Between looks at signals and progress.
constexpr auto look_interval = std::chrono::milliseconds(50);

/// What the thread that works tells the one that waits.
class News {
 public:
  /// The latest of every piece of work.
  void tell(const ProgressState& state) {
    const std::lock_guard lock(mutex_);
    for (auto& known : states_) {
      if (known.label == state.label) {
        known = state;
        return;
      }
    }
    states_.push_back(state);
  }
  void finish() {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }
  /// What was told since the last look, after a while or at the end.
  std::pair<std::vector<ProgressState>, bool> wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, look_interval, [&] { return finished_; });
    return {std::exchange(states_, {}), finished_};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ProgressState> states_;
  bool finished_ = false;
};

/// Undoes what a command sets up for itself in this process.
class Listening {
 public:
  Listening(News& news, std::string& report) {
    set_progress_listener([&news](const ProgressState& state) { news.tell(state); });
    app::set_report_listener(
        [&report](const io::Json& json) { report = json.dump(-1, ' ', false, io::Json::error_handler_t::replace); });
  }
  ~Listening() {
    set_progress_listener(nullptr);
    app::set_report_listener(nullptr);
    forget_interrupt();
    io::forget_changed_inputs();
  }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;
};

/// Signals are taken by other threads: on the stack of this one and of those that it starts, compiled kernels may stand
/// that no handler may run on (core/interrupt.h).
void block_signals() {
  sigset_t all;
  ::sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

int parse_and_run(const std::vector<std::string>& words) {
  std::vector<const char*> line{"w4q"};
  for (const auto& word : words) line.push_back(word.c_str());
  app::Action action;
  const auto program = app::make_program(action);
  try {
    program->parse(static_cast<int>(line.size()), line.data());
  } catch (const CLI::Success&) {
    throw Error(ErrorCode::bad_argument, "help is for the command line").hint("w4q --help");
  } catch (const CLI::ParseError& error) {
    throw app::wrong_command_line(*program, error);
  }
  if (!app::devices_of(*program).empty()) {
    throw Error(ErrorCode::unsupported, "--devices makes processes of the program, and not of Python")
        .hint("run w4q, or choose one GPU: --device cuda:0");
  }
  app::remember_command(static_cast<int>(line.size()), line.data());
  const int status = action();
  if (const auto changed = io::changed_input()) throw *changed;
  return status;
}

/// The result of a thread: what it returned or threw.
struct Result {
  int status = 0;
  std::optional<Error> error;
  bool interrupted = false;
};

Result work(const std::vector<std::string>& words) noexcept {
  try {
    return {.status = parse_and_run(words), .error = {}};
  } catch (const Interrupted&) {
    return {.error = {}, .interrupted = true};
  } catch (const std::exception&) {
    return {.error = app::error_in_flight()};
  }
}

/// With the interpreter's lock. Throws nb::python_error.
void look(const std::vector<ProgressState>& states, const nb::object& on_progress) {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  if (on_progress.is_none()) return;
  for (const auto& state : states) {
    on_progress(state.label, state.done, state.total, state.unit);
  }
}

/// Waits for the work. The first exception meanwhile, which has stopped it; null: there was none.
std::exception_ptr wait_for(News& news, const nb::object& on_progress) {
  std::exception_ptr stopped;
  for (bool finished = false; !finished;) {
    std::vector<ProgressState> states;
    {
      const nb::gil_scoped_release release;
      std::tie(states, finished) = news.wait();
    }
    if (stopped) continue;
    try {
      look(states, on_progress);
    } catch (...) {
      stopped = std::current_exception();
      note_interrupt(SIGINT);
    }
  }
  return stopped;
}

/// The work in a thread of its own. Throws what stopped it.
Result run(const std::vector<std::string>& words, std::string& report, const nb::object& on_progress) {
  News news;
  const Listening listening(news, report);
  Result result;
  std::thread thread([&] {
    block_signals();
    result = work(words);
    news.finish();
  });
  const std::exception_ptr stopped = wait_for(news, on_progress);
  {
    const nb::gil_scoped_release release;
    thread.join();
  }
  if (stopped) std::rethrow_exception(stopped);
  return result;
}

std::atomic<bool> busy{false};

/// One command at a time: threads, progress and interrupts are the process's.
class Turn {
 public:
  Turn() {
    if (busy.exchange(true)) {
      throw Error(ErrorCode::bad_argument, "another command of w4q runs in this process")
          .hint("wait for it, or use a process for each");
    }
  }
  ~Turn() { busy = false; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

}  // namespace

Outcome run_command(const std::vector<std::string>& words, nb::object on_progress) {
  const Turn turn;
  static std::once_flag once;
  std::call_once(once, io::survive_lost_pages);
  Outcome outcome;
  const Result result = run(words, outcome.report, on_progress);
  if (result.error) throw Error(*result.error);
  ensure(!result.interrupted, "run_command: interrupted by nobody");
  outcome.exit_status = result.status;
  return outcome;
}

}  // namespace w4q::python
