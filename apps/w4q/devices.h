// --devices 0,1: one command on several GPUs of this machine, without a launcher.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace w4q::app {

/// For commands that ranks share on GPUs; they have --device already.
void add_devices(CLI::App& command, std::string& devices);

/// The GPUs that a parsed command line names; empty: it has no --devices.
std::vector<int> devices_of(const CLI::App& program);

/// Makes as many ranks of this process. W4Q_LOCAL_RANKS=N in the environment makes N, for tests where there are no GPUs.
/// Before any thread starts. Throws bad_argument for a process that is one of several already.
void make_ranks(const CLI::App& program);

/// Tells each rank its GPU: of those that were chosen, or of those of this machine. Throws device where a chosen one
/// cannot be used.
void take_device(const CLI::App& program);

}  // namespace w4q::app
