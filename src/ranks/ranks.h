// The processes of one run, which mpirun or srun started, or one of them made: who is who, and what they say to each other. A program that
// nobody started as one of several is alone, and all of this costs nothing.
//
// No rank waits for ever: whoever waits also looks for a rank that has failed, and then throws Stopped. How a run ends
// is agreed upon in the end (end_together), so that of several ranks one tells what went wrong.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace w4q::ranks {

/// Thrown where another rank has failed, which says why.
class Stopped : public std::exception {
 public:
  const char* what() const noexcept override { return "another rank failed"; }
};

/// How the work of a rank, or of all, ended.
struct Ending {
  int status = 0;                   ///< exit status where all went well
  int signal = 0;                   ///< that interrupted it; 0: none
  bool stopped = false;             ///< since another rank failed
  std::optional<Error> error = {};  ///< nothing: all went well, or the two above
  bool tells = true;                ///< whether this rank reports it; of one that is sent: false where its sender does

  bool good() const noexcept { return signal == 0 && !stopped && !error; }
};

/// What a process does that a signal ends where its work has not ended soon: launchers kill a second later. `tells`:
/// whether it is the one of all ranks to say how the run ended.
using LastWords = void (*)(const Ending& ending, bool tells);

class Transport;

/// All ranks make the same calls in the same order, but for send and receive, which go in pairs. Bytes travel as
/// strings. Every call that waits throws Stopped when another rank has failed, and Interrupted.
class Ranks {
 public:
  /// One process by itself.
  Ranks();
  /// One of those that speak to each other by `transport`, which outlives it.
  explicit Ranks(Transport& transport);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The one that reports, and that makes what there is one of.
  bool first() const noexcept { return rank_ == 0; }

  /// Begins to send and goes on, once what was sent to that rank before has left.
  void send(int to, std::string bytes);
  std::string receive(int from);

  void barrier();
  /// What the rank `from` gives, at every rank.
  std::string broadcast(std::string bytes, int from = 0);
  /// What every rank gives, in their order: at the first rank, or at every rank. Elsewhere nothing.
  std::vector<std::string> gather(std::string bytes);
  std::vector<std::string> gather_everywhere(std::string bytes);
  /// What `own` returns at every rank, in their order, at every rank. Where it throws an Error somewhere, every rank throws
  /// that of the lowest that did, once all have done theirs: for whoever goes on after an error, which must be everybody.
  std::vector<std::string> together(const std::function<std::string()>& own);
  /// By the first rank, where its work ends with an exception: others hear of it before what they work on goes.
  void stop_others() noexcept;
  /// Throws mismatch at every rank where `text`, which is `what`, is not the same on all: other programs, other machines.
  void require_same(std::string_view what, std::string_view text);

 private:
  friend void start();
  friend void set_last_words(LastWords words) noexcept;
  friend int end_together(Ending own, const std::function<int(const Ending&)>& conclude);
  struct Impl;
  class Farewell;

  static void look_for_failure();
  static void speak_in_time(int signal);
  static std::atomic<Impl*> joined_;  // once this process has joined the others

  int rank_ = 0, size_ = 1;
  std::unique_ptr<Impl> impl_;  // null: alone
};

/// What the environment of the process says, before anything is started: which of how many it is; nothing for a program
/// that is not one of several.
struct Launched {
  int rank = 0, size = 1;
  std::string variable;                ///< that said so
  int local_rank = 0, local_size = 1;  ///< among those on this machine; where nothing says so all are there
};
std::optional<Launched> launched();

/// Makes `count` ranks of this process, itself the first one, where no launcher is: the others are copies of it, and end
/// with it. Before any other thread starts and a GPU is asked for. launched() then names `by`, which asked for them.
/// Throws internal where they cannot be made.
void fork_here(int count, std::string by);
/// Ranks that fork_here() made, which share the cores that one process would have; 1: it made none.
int ranks_here();

/// Before watch_for_interrupts() and start(). Called in a thread of its own, only where start() has been called and there
/// are several ranks.
void set_last_words(LastWords words) noexcept;

/// Joins the other ranks where launched() says that there are some. Throws unsupported where this program was built
/// without MPI, or MPI cannot be loaded.
void start();
/// The ranks of this run: one, unless start() has found more.
Ranks& world() noexcept;

/// The last call: says how this rank ended, hears how all did, and ends MPI. Of errors that of the lowest rank is the
/// error of all. `conclude` tells how the run ended and returns its exit status: at the first rank, and at one that got no
/// answer. A rank that does not answer within some seconds of a failure is ended by the launcher.
int end_together(Ending own, const std::function<int(const Ending&)>& conclude);

}  // namespace w4q::ranks
