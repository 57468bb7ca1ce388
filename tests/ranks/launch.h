// Starts the program as several processes of one run.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "../cli/program.h"

namespace w4q::test {

/// Why there are no ranks here; empty: there are.
inline std::string no_ranks() {
  if (!W4Q_HAVE_MPI) return "this build has no MPI";
  return std::string(W4Q_MPIRUN).empty() ? "mpirun is missing (scripts/setup ranks)" : "";
}

inline std::vector<std::string> mpirun(int ranks) {
  std::vector<std::string> words{W4Q_MPIRUN, "-q", "--oversubscribe", "--bind-to", "none", "-n", std::to_string(ranks)};
  if (::geteuid() == 0) words.insert(words.begin() + 1, "--allow-run-as-root");
  return words;
}

inline ProgramResult run_ranks(int ranks, std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--threads", "1"});
  return run_w4q_behind(mpirun(ranks), arguments);
}

/// A text that the bundled model wrote.
inline std::string own_text() { return bundled_model() + "/own/selfgen.txt"; }

/// How often `what` stands in a text.
inline size_t count(const std::string& text, std::string_view what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// What stands beside an output, hidden things included.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

inline std::vector<pid_t> children_of(pid_t parent) {
  std::ifstream list("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  std::vector<pid_t> children;
  for (pid_t child = 0; list >> child;) children.push_back(child);
  return children;
}

/// Whether all that it started have ended, and it has not asked how.
inline bool waits_for_the_ended(pid_t launcher) {
  const auto ranks = children_of(launcher);
  return !ranks.empty() && std::all_of(ranks.begin(), ranks.end(), [](pid_t rank) {
    std::string text;
    std::getline(std::ifstream("/proc/" + std::to_string(rank) + "/stat"), text);
    return text.find(") Z ") != std::string::npos;
  });
}

/// The hidden folder of an output; empty: there is none.
inline std::filesystem::path hidden_of(const std::filesystem::path& output) {
  for (const auto& entry : std::filesystem::directory_iterator(output.parent_path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("." + output.filename().string() + ".w4q-partial-")) return entry.path();
  }
  return {};
}

/// Once work on `output` has begun, sends `signal` to the process that `victim` finds for one that this one started, 0:
/// none; gives up when the run has ended. Whether it was sent.
template <class Victim>
bool signal_when_begun(const std::filesystem::path& output, int signal, const std::atomic<bool>& ended,
                       const Victim& victim) {
  const pid_t own = ::getpid();
  bool met = false;
  while (!met && !ended) {
    ::usleep(1000);
    const auto hidden = hidden_of(output);
    if (hidden.empty() || !std::filesystem::exists(hidden / "w4q_journal.2.jsonl")) continue;
    for (const pid_t started : children_of(own)) {
      const pid_t found = victim(started);
      if (found > 0) met = ::kill(found, signal) == 0;
    }
  }
  return met;
}

class OnRanks : public OnBundledModel {
 protected:
  using OnBundledModel::OnBundledModel;

  void SetUp() override {
    if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  }
};

}  // namespace w4q::test
