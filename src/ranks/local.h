// Ranks of one machine that a process makes of itself, without a launcher: messages go through files in memory, one for
// each rank and each that it speaks to, which are made before the processes part.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "ranks/ranks.h"
#include "ranks/transport.h"

namespace w4q::ranks {

/// Where the messages of `size` ranks lie.
class Mailboxes {
 public:
  /// Throws internal where the system has no memory or no files for them.
  explicit Mailboxes(int size);
  ~Mailboxes();
  Mailboxes(const Mailboxes&) = delete;
  Mailboxes& operator=(const Mailboxes&) = delete;

  /// What a rank speaks through, one for each, which this must outlive. `others`: for the first rank the processes of
  /// those behind it, which finish() waits for; empty where ranks are threads.
  std::unique_ptr<Transport> transport(int rank, std::vector<pid_t> others = {});
  /// Memory that messages between all ranks take now, in bytes.
  uint64_t memory() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Which of those that fork_here() made this process is; nothing: there are none.
std::optional<Launched> forked_here();
/// Through which it speaks to them.
Transport& forked_transport();

}  // namespace w4q::ranks
