// What ranks need of a message-passing library: messages that begin now and are done later. mpi.cpp is a library of its
// own that is loaded where there are ranks, so that a program by itself neither needs nor starts MPI; local.cpp is for
// ranks that a process makes of itself.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace w4q::ranks {

class Transport {
 public:
  /// A message that is under way.
  struct Request;
  struct Waiting {
    int from = 0;
    size_t size = 0;
  };
  /// Bytes of a message at most.
  static constexpr size_t most = size_t{1} << 30;

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Messages of one tag between two ranks arrive in their order. `data` stays as it is until the request is done.
  virtual Request* send(int to, int tag, const std::byte* data, size_t size) = 0;
  virtual Request* receive(int from, int tag, std::byte* data, size_t size) = 0;
  /// Whether it is; the request is gone then.
  virtual bool done(Request* request) = 0;
  /// A message with this tag that nobody has begun to receive; `from` −1: of any rank.
  virtual std::optional<Waiting> waiting(int from, int tag) = 0;
  /// How the process of a rank has ended, as "was ended by signal 9 (Killed)"; empty: it lives, or nobody knows here.
  virtual std::string ended(int /*rank*/) { return {}; }
  /// Ends it on all ranks; what is under way is forgotten.
  virtual void finish() = 0;
  /// Ends this process and, as far as the launcher can, all others.
  virtual void abort(int status) = 0;
};

/// What the library has under the name w4q_open_transport; null where MPI cannot be started.
using OpenTransport = Transport* (*)();

}  // namespace w4q::ranks
