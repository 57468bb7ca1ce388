// The commands of the program as functions: the same options, checks and reports, without its terminal.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

namespace w4q::python {

/// What a command did.
struct Outcome {
  int exit_status = 0;  ///< of the program; where it is not 0 there is a report all the same (verify, compare)
  std::string report;   ///< as --json prints it; empty: the command reports nothing
};

/// Runs `words`, a command line without the leading "w4q", in a thread of its own. Meanwhile the caller's thread, without
/// the interpreter's lock, waits for signals, and hands what progress there is to `on_progress` (label, done, total, unit),
/// unless that is None. A Python exception of either (KeyboardInterrupt) stops the work at its next step, which cleans up
/// after itself, and goes on up. Throws Error as the command does, bad_argument while another command runs in this process.
Outcome run_command(const std::vector<std::string>& words, nanobind::object on_progress);

}  // namespace w4q::python
