#include "ranks/local.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <new>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace w4q::ranks {

/// Done once the other side has taken as many messages of this kind.
struct Transport::Request {
  const std::atomic<uint64_t>* taken = nullptr;
  uint64_t number = 0;
};

constexpr size_t kinds = 8;  // of messages: tags are less

/// How far one rank has come in what it says to another, in memory that both see.
struct MessageBox {
  std::atomic<uint64_t> written{0};                     ///< bytes of the file up to the end of the last whole message
  std::array<std::atomic<uint64_t>, kinds> taken = {};  ///< messages that have been received, by tag
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

/// Before the bytes of each message.
struct Header {
  uint64_t size = 0;
  int64_t tag = 0;
};

Error refused(std::string_view doing) {
  return {ErrorCode::internal, concat("ranks on this machine: ", doing, ": ", std::strerror(errno))};
}

void write_all(int file, const void* data, size_t size, uint64_t offset) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (size > 0) {
    const ssize_t count = ::pwrite(file, bytes, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw refused("a message finds no memory");
    bytes += count, offset += static_cast<uint64_t>(count), size -= static_cast<size_t>(count);
  }
}

void read_all(int file, void* data, size_t size, uint64_t offset) {
  auto* bytes = static_cast<std::byte*>(data);
  while (size > 0) {
    const ssize_t count = ::pread(file, bytes, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw refused("a message cannot be read");
    bytes += count, offset += static_cast<uint64_t>(count), size -= static_cast<size_t>(count);
  }
}

/// Files only grow, and what has been received is given back to the system.
class Sender {
 public:
  Sender(int file, MessageBox& box) : file_(file), box_(box) {}

  Transport::Request* send(int tag, const std::byte* data, size_t size) {
    const Header header{size, tag};
    const uint64_t begin = box_.written;
    write_all(file_, &header, sizeof header, begin);
    write_all(file_, data, size, begin + sizeof header);
    box_.written = begin + sizeof header + size;
    const auto kind = static_cast<size_t>(tag);
    return new Transport::Request{&box_.taken.at(kind), ++sent_.at(kind)};
  }

 private:
  int file_;
  MessageBox& box_;
  std::array<uint64_t, kinds> sent_{};
};

class Receiver {
 public:
  Receiver(int file, MessageBox& box) : file_(file), box_(box) {}

  /// Bytes of the oldest message with this tag.
  std::optional<size_t> waiting(int tag) {
    for (Header header; seen_ < box_.written; seen_ += sizeof header + header.size) {
      read_all(file_, &header, sizeof header, seen_);
      messages_.push_back({seen_, header});
    }
    const auto found = oldest(tag);
    return found != messages_.end() ? std::optional(found->header.size) : std::nullopt;
  }

  void receive(int tag, std::byte* data, size_t size) {
    const auto found = oldest(tag);
    ensure(found != messages_.end() && found->header.size == size, "a message of another size came from a rank");
    read_all(file_, data, size, found->begin + sizeof(Header));
    messages_.erase(found);
    give_back();
    ++box_.taken.at(static_cast<size_t>(tag));
  }

 private:
  struct Message {
    uint64_t begin = 0;
    Header header;
  };

  std::deque<Message>::iterator oldest(int tag) {
    return std::ranges::find_if(messages_, [&](const Message& each) { return each.header.tag == tag; });
  }

  /// What lies before the oldest message, in whole pages. Where the system cannot, memory stays taken until the end.
  void give_back() {
    constexpr uint64_t page = 65'536, enough = 16 * page;
    const uint64_t end = (messages_.empty() ? seen_ : messages_.front().begin) / page * page;
    if (end < freed_ + enough) return;
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(freed_),
                static_cast<off_t>(end - freed_));
    freed_ = end;
  }

  int file_;
  MessageBox& box_;
  uint64_t seen_ = 0, freed_ = 0;
  std::deque<Message> messages_;
};

/// How a process has ended, while nobody has asked for it; empty: it has not.
std::string end_of(pid_t process) {
  siginfo_t how{};
  if (::waitid(P_PID, static_cast<id_t>(process), &how, WEXITED | WNOHANG | WNOWAIT) != 0 || how.si_pid == 0) return {};
  if (how.si_code == CLD_EXITED) return concat("has ended with exit status ", how.si_status);
  return concat("was ended by signal ", how.si_status, " (", ::strsignal(how.si_status), ")");
}

}  // namespace

struct Mailboxes::Impl {
  explicit Impl(int size_) : size(size_) {
    const size_t count = static_cast<size_t>(size) * static_cast<size_t>(size);
    bytes = count * sizeof(MessageBox);
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw refused("no memory for messages");
    boxes = static_cast<MessageBox*>(memory);
    for (size_t i = 0; i < count; ++i) {
      new (&boxes[i]) MessageBox;
      files.push_back(::memfd_create("w4q-ranks", MFD_CLOEXEC));
      if (files.back() >= 0) continue;
      const Error error = refused("no file for messages");
      close();
      throw error;
    }
  }
  ~Impl() { close(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void close() noexcept {
    for (const int file : files) {
      if (file >= 0) ::close(file);
    }
    ::munmap(boxes, bytes);
  }

  size_t place(int from, int to) const noexcept {
    return static_cast<size_t>(from) * static_cast<size_t>(size) + static_cast<size_t>(to);
  }

  const int size;
  size_t bytes = 0;
  MessageBox* boxes = nullptr;  // by sender and receiver
  std::vector<int> files;       // the same
};

namespace {

class Local final : public Transport {
 public:
  Local(int rank, std::vector<Sender> senders, std::vector<Receiver> receivers, std::vector<pid_t> others)
      : rank_(rank), senders_(std::move(senders)), receivers_(std::move(receivers)), others_(std::move(others)) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(senders_.size()); }

  Request* send(int to, int tag, const std::byte* data, size_t size) override {
    return senders_.at(static_cast<size_t>(to)).send(tag, data, size);
  }
  /// Whole messages wait only, so that it is done at once.
  Request* receive(int from, int tag, std::byte* data, size_t size) override {
    receivers_.at(static_cast<size_t>(from)).receive(tag, data, size);
    return nullptr;
  }
  bool done(Request* request) override {
    if (request != nullptr && *request->taken < request->number) return false;
    delete request;
    return true;
  }
  std::optional<Waiting> waiting(int from, int tag) override {
    const int begin = from < 0 ? 0 : from, end = from < 0 ? size() : from + 1;
    for (int sender = begin; sender < end; ++sender) {
      if (const auto bytes = receivers_[static_cast<size_t>(sender)].waiting(tag)) return Waiting{sender, *bytes};
    }
    return std::nullopt;
  }
  std::string ended(int rank) override {
    return others_.empty() || rank == 0 ? "" : end_of(others_.at(static_cast<size_t>(rank) - 1));
  }
  void finish() override {
    for (const pid_t other : std::exchange(others_, {})) ::waitpid(other, nullptr, 0);
  }
  /// Those that the first rank started end with it.
  void abort(int status) override {
    if (rank_ != 0) ::kill(::getppid(), SIGKILL);
    for (const pid_t other : others_) ::kill(other, SIGKILL);
    ::_exit(status);
  }

 private:
  int rank_;
  std::vector<Sender> senders_;
  std::vector<Receiver> receivers_;
  std::vector<pid_t> others_;
};

}  // namespace

Mailboxes::Mailboxes(int size) : impl_(std::make_unique<Impl>(size)) {}
Mailboxes::~Mailboxes() = default;

std::unique_ptr<Transport> Mailboxes::transport(int rank, std::vector<pid_t> others) {
  std::vector<Sender> senders;
  std::vector<Receiver> receivers;
  for (int other = 0; other < impl_->size; ++other) {
    const size_t out = impl_->place(rank, other), in = impl_->place(other, rank);
    senders.emplace_back(impl_->files[out], impl_->boxes[out]);
    receivers.emplace_back(impl_->files[in], impl_->boxes[in]);
  }
  return std::make_unique<Local>(rank, std::move(senders), std::move(receivers), std::move(others));
}

uint64_t Mailboxes::memory() const {
  constexpr uint64_t unit = 512;  // of st_blocks
  uint64_t bytes = 0;
  for (const int file : impl_->files) {
    struct stat found {};
    if (::fstat(file, &found) == 0) bytes += unit * static_cast<uint64_t>(found.st_blocks);
  }
  return bytes;
}

namespace {

/// Of this process, until it ends.
struct Forked {
  std::unique_ptr<Mailboxes> boxes;
  std::unique_ptr<Transport> transport;
  std::string by;
};

Forked& forked() {
  static Forked forked;
  return forked;
}

/// In a process that has just been made: it ends with the one that made it, which alone reads what is typed.
void become_follower(pid_t leader) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != leader) ::_exit(1);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing < 0) return;
  ::dup2(nothing, STDIN_FILENO);
  ::close(nothing);
}

}  // namespace

void fork_here(int count, std::string by) {
  Forked& own = forked();
  ensure(own.transport == nullptr && count > 0, "fork_here: called twice, or for nobody");
  if (count == 1) return;
  own.boxes = std::make_unique<Mailboxes>(count);
  own.by = std::move(by);
  const pid_t leader = ::getpid();
  std::vector<pid_t> others;
  for (int rank = 1; rank < count; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) {
      become_follower(leader);
      own.transport = own.boxes->transport(rank);
      return;
    }
    if (process < 0) {
      const Error error = refused("a process cannot be made");
      for (const pid_t other : others) ::kill(other, SIGKILL);
      throw error;
    }
    others.push_back(process);
  }
  own.transport = own.boxes->transport(0, std::move(others));
}

std::optional<Launched> forked_here() {
  const Forked& own = forked();
  if (own.transport == nullptr) return std::nullopt;
  const int rank = own.transport->rank(), size = own.transport->size();
  return Launched{rank, size, own.by, rank, size};
}

int ranks_here() {
  const auto found = forked_here();
  return found ? found->size : 1;
}

Transport& forked_transport() { return *forked().transport; }

}  // namespace w4q::ranks
