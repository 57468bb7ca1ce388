// The only file that knows MPI.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "ranks/transport.h"

namespace w4q::ranks {

struct Transport::Request {
  MPI_Request value = MPI_REQUEST_NULL;
};

namespace {

class Mpi final : public Transport {
 public:
  Mpi() {
    // A rank that is gone is noticed by whoever waits, not by the library's own end of the program.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
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
};

}  // namespace
}  // namespace w4q::ranks

extern "C" __attribute__((visibility("default"))) w4q::ranks::Transport* w4q_open_transport() {
  int level = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return nullptr;
  static w4q::ranks::Mpi mpi;
  return level < MPI_THREAD_SERIALIZED ? nullptr : &mpi;
}
