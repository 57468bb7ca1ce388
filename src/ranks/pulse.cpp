#include "ranks/pulse.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/text.h"

namespace w4q::ranks {
namespace {

using namespace std::chrono_literals;

constexpr auto tick = 50ms;
/// Messages on their way move on when the library is called: as often as this by a rank that computes, and more seldom
/// once a message has waited for a second, as for another rank that computes.
constexpr Pulse::Clock::duration moving_tick = 50us, waiting_tick = 1ms;
constexpr int waiting_rests = 1s / tick;
/// For a rank that has heard of it to unwind.
constexpr auto grace = 5s;

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown host";
}

Pulse::Clock::duration pulse_patience() {
  constexpr int usual = 15;
  const char* const text = std::getenv("W4Q_RANK_TIMEOUT");
  int seconds = usual;
  if (text != nullptr && std::from_chars(text, text + std::strlen(text), seconds).ec != std::errc()) seconds = usual;
  return std::chrono::seconds(std::max(0, seconds));
}

Pulse::Pulse(Transport& transport, std::mutex& mutex, int tag, Clock::duration patience, Duties duties)
    : transport_(transport),
      mutex_(mutex),
      tag_(tag),
      patience_(patience),
      duties_(std::move(duties)),
      host_(host_name()) {
  const int first = transport.rank() == 0 ? 1 : 0, end = transport.rank() == 0 ? transport.size() : 1;
  for (int rank = first; rank < end; ++rank) others_.push_back({rank, "a host that said nothing", Clock::now()});
  // Signals are for the threads that work.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pulse::stop() {
  stops_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
}

/// Nothing: it lives.
std::optional<Error> Pulse::loss_of(const Other& other, Clock::time_point now) {
  const std::string rank = concat("rank ", other.rank, " of ", transport_.size());
  if (const std::string how = transport_.ended(other.rank); !how.empty()) {
    return Error(ErrorCode::internal, concat(rank, " ", how))
        .hint("where memory is short the system ends processes; --dry-run shows what a command needs");
  }
  if (patience_ == 0s || now - other.heard < patience_) return std::nullopt;
  return Error(ErrorCode::internal, concat(rank, ", on ", other.host, ", has not been heard of for ",
                                           human_seconds(std::chrono::duration<double>(patience_).count())))
      .detail("it was stopped, or no network leads to it any more")
      .hint("W4Q_RANK_TIMEOUT=0 waits for ever (docs/scale.md)");
}

void Pulse::run() {
  auto last = Clock::now(), spoke = Clock::time_point();
  while (!stops_) {
    const auto now = Clock::now();
    // Whoever slept itself, as when all ranks are suspended, has heard nobody.
    if (patience_ > 0s && now - last > patience_ / 3) {
      for (auto& other : others_) other.heard = now;
    }
    last = now;
    if (lost_ >= 0 && duties_.give_up && now - lost_since_ > grace) std::exchange(duties_.give_up, nullptr)();
    listen(now);
    if (now - spoke > std::min<Clock::duration>(1s, patience_ / 10)) speak(), spoke = now;
    rest();
  }
}

void Pulse::wake() {
  {
    const std::lock_guard lock(rest_);
    moving_ = true;
  }
  woken_.notify_one();
}

void Pulse::rest() {
  const auto until = Clock::now() + tick;
  {
    std::unique_lock lock(rest_);
    if (!woken_.wait_until(lock, until, [&] { return moving_; })) return;
    moving_ = false;
  }
  while (!stops_ && duties_.move()) {
    if (Clock::now() >= until) {  // there is more to do meanwhile
      ++moving_rests_;
      return wake();
    }
    std::this_thread::sleep_for(moving_rests_ < waiting_rests ? moving_tick : waiting_tick);
  }
  moving_rests_ = 0;
}

void Pulse::listen(Clock::time_point now) {
  for (auto& other : others_) {
    const std::lock_guard lock(mutex_);
    while (const auto found = transport_.waiting(other.rank, tag_)) {
      other.host.resize(found->size);
      auto* const request =
          transport_.receive(other.rank, tag_, reinterpret_cast<std::byte*>(other.host.data()), found->size);
      while (!transport_.done(request)) std::this_thread::yield();
      other.heard = now;
    }
    if (lost_ >= 0 || !(lost_error_ = loss_of(other, now))) continue;
    lost_since_ = now;
    lost_ = other.rank;
  }
}

/// One message to each at a time: a network that leads nowhere does not fill memory.
void Pulse::speak() {
  for (auto& other : others_) {
    const std::lock_guard lock(mutex_);
    if (other.beat != nullptr && !transport_.done(other.beat)) continue;
    other.beat = transport_.send(other.rank, tag_, reinterpret_cast<const std::byte*>(host_.data()), host_.size());
  }
}

}  // namespace w4q::ranks
