// Ranks as threads of one process, for laws that run over many cases: no launcher, and no process to start.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ranks/ranks.h"
#include "ranks/transport.h"

namespace w4q::test {

/// Letters between the threads of one run; messages are complete as soon as they are sent.
class Letters {
 public:
  using Letter = std::vector<std::byte>;

  void post(int from, int to, int tag, Letter letter) {
    const std::lock_guard lock(mutex_);
    boxes_[{to, tag, from}].push_back(std::move(letter));
  }
  Letter take(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    auto& box = boxes_.at({to, tag, from});
    Letter letter = std::move(box.front());
    box.pop_front();
    return letter;
  }
  /// Throws where a rank has failed, so that nobody waits for it.
  std::optional<ranks::Transport::Waiting> waiting(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    if (broken_) throw std::runtime_error("another thread failed");
    for (const auto& [place, box] : boxes_) {
      const auto& [receiver, kind, sender] = place;
      if (receiver != to || kind != tag || (from >= 0 && sender != from) || box.empty()) continue;
      return ranks::Transport::Waiting{sender, box.front().size()};
    }
    return std::nullopt;
  }
  void break_off() {
    const std::lock_guard lock(mutex_);
    broken_ = true;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, std::deque<Letter>> boxes_;
  bool broken_ = false;
};

class ThreadTransport final : public ranks::Transport {
 public:
  ThreadTransport(Letters& letters, int rank, int size) : letters_(letters), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Request* send(int to, int tag, const std::byte* data, size_t size) override {
    letters_.post(rank_, to, tag, {data, data + size});
    return nullptr;
  }
  Request* receive(int from, int tag, std::byte* data, size_t size) override {
    const auto letter = letters_.take(from, rank_, tag);
    if (letter.size() != size) throw std::runtime_error("a letter of another size");
    if (size > 0) std::memcpy(data, letter.data(), size);
    return nullptr;
  }
  bool done(Request*) override { return true; }
  std::optional<Waiting> waiting(int from, int tag) override { return letters_.waiting(from, rank_, tag); }
  void finish() override {}
  void abort(int) override { letters_.break_off(); }

 private:
  Letters& letters_;
  int rank_, size_;
};

/// body(ranks) in `size` threads; throws what the lowest rank threw.
inline void run_as_ranks(int size, const std::function<void(ranks::Ranks&)>& body) {
  Letters letters;
  std::vector<std::exception_ptr> failures(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadTransport transport(letters, rank, size);
        ranks::Ranks ranks(transport);
        body(ranks);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
        letters.break_off();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace w4q::test
