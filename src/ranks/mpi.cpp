// The only file that knows MPI.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <fcntl.h>
#include <mpi.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "ranks/transport.h"

namespace w4q::ranks {

struct Transport::Request {
  MPI_Request value = MPI_REQUEST_NULL;
};

namespace {

/// A process, and where its number means something: the start of a system and a namespace of processes.
struct Place {
  std::array<char, 40> system{};
  int64_t names = 0;
  int64_t process = 0;

  bool beside(const Place& other) const { return names != 0 && system == other.system && names == other.names; }
};

Place own_place() {
  Place place;
  place.process = ::getpid();
  const int file = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  const bool known = file >= 0 && ::read(file, place.system.data(), place.system.size() - 1) > 0;
  if (file >= 0) ::close(file);
  struct stat names {};
  if (known && ::stat("/proc/self/ns/pid", &names) == 0) place.names = static_cast<int64_t>(names.st_ino);
  return place;
}

/// Descriptors by which the ends of the ranks on this machine are noticed; −1 for others, and where the system has none.
std::vector<int> watched_processes(int rank, int size) {
  const Place own = own_place();
  std::vector<Place> all(static_cast<size_t>(size));
  std::vector<int> watched(all.size(), -1);
  const bool told = MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, MPI_COMM_WORLD) == 0;
#ifdef SYS_pidfd_open
  for (size_t other = 0; told && other < all.size(); ++other) {
    if (other == static_cast<size_t>(rank) || !own.beside(all[other])) continue;
    watched[other] = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(all[other].process), 0));
  }
#endif
  return watched;
}

class Mpi final : public Transport {
 public:
  Mpi() {
    // A rank that is gone is noticed by whoever waits, not by the library's own end of the program.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    watched_ = watched_processes(rank_, size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Request* send(int to, int tag, const std::byte* data, size_t size) override {
    auto* const request = new Request;
    MPI_Isend(data, static_cast<int>(size), MPI_BYTE, to, tag, MPI_COMM_WORLD, &request->value);
    return request;
  }

  Request* receive(int from, int tag, std::byte* data, size_t size) override {
    auto* const request = new Request;
    MPI_Irecv(data, static_cast<int>(size), MPI_BYTE, from, tag, MPI_COMM_WORLD, &request->value);
    return request;
  }

  bool done(Request* request) override {
    int flag = 0;
    MPI_Test(&request->value, &flag, MPI_STATUS_IGNORE);
    if (flag == 0) return false;
    delete request;
    return true;
  }

  std::optional<Waiting> waiting(int from, int tag) override {
    int flag = 0, count = 0;
    MPI_Status status;
    MPI_Iprobe(from < 0 ? MPI_ANY_SOURCE : from, tag, MPI_COMM_WORLD, &flag, &status);
    if (flag == 0) return std::nullopt;
    MPI_Get_count(&status, MPI_BYTE, &count);
    return Waiting{status.MPI_SOURCE, static_cast<size_t>(count)};
  }

  std::string ended(int rank) override {
    pollfd process{watched_[static_cast<size_t>(rank)], POLLIN, 0};
    return process.fd >= 0 && ::poll(&process, 1, 0) == 1 ? "has ended without a word, as one that is killed" : "";
  }

  void finish() override { MPI_Finalize(); }
  /// Where the launcher is out of reach its call comes back never, or late.
  void abort(int status) override {
    std::thread([status] {
      std::this_thread::sleep_for(std::chrono::seconds(5));
      ::_exit(status);
    }).detach();
    MPI_Abort(MPI_COMM_WORLD, status);
  }

 private:
  int rank_ = 0, size_ = 1;
  std::vector<int> watched_;  // by rank
};

}  // namespace
}  // namespace w4q::ranks

extern "C" __attribute__((visibility("default"))) w4q::ranks::Transport* w4q_open_transport() {
  int level = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return nullptr;
  static w4q::ranks::Mpi mpi;
  return level < MPI_THREAD_SERIALIZED ? nullptr : &mpi;
}
