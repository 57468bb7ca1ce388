#include "ranks/ranks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "core/interrupt.h"
#include "core/interrupt_check.h"
#include "core/text.h"
#include "ranks/connect.h"
#include "ranks/pulse.h"

namespace w4q::ranks {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Of messages: the size of one to come and its bytes; that a rank has failed; how one ended; how all did; that one lives;
/// that one has told in place of the first how the run ended.
enum Tag : int { data_tag = 1, stop_tag, ending_tag, verdict_tag, pulse_tag, told_tag };

/// How long a failed run waits for the ranks that have not answered yet. The first one, which waits for all others, hears
/// of a failure later than the one that failed, and must not be ended by that while it waits. A launcher that ends a run
/// by signals waits a second only before it kills.
constexpr milliseconds patience{10'000}, patience_for_the_verdict{15'000}, patience_with_signals{500},
    patience_with_the_lost{1'000};
/// What a signal leaves to whatever works, before somebody else says how the run ended.
constexpr milliseconds time_for_work{500};

std::atomic<LastWords> last_words{nullptr};

std::string joined(const Ending& ending) {
  std::string text = concat(ending.status, " ", ending.signal, " ", ending.stopped ? 1 : 0, " ", ending.tells ? 1 : 0,
                            " ", ending.error ? static_cast<int>(ending.error->code()) : -1);
  if (!ending.error) return text;
  for (const auto& part : {ending.error->summary(), ending.error->details(), ending.error->hint()}) {
    text += '\0';
    text += part;
  }
  return text;
}

Ending parsed(const std::string& text) {
  std::array<int, 5> numbers{};
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.resize(4);
  std::istringstream words(parts[0]);
  for (int& number : numbers) words >> number;
  Ending ending{.status = numbers[0],
                .signal = numbers[1],
                .stopped = numbers[2] != 0,
                .error = std::nullopt,
                .tells = numbers[3] != 0};
  if (numbers[4] < 0) return ending;
  ending.error.emplace(static_cast<ErrorCode>(numbers[4]), parts[1]);
  for (size_t begin = 0; begin < parts[2].size();) {
    begin = std::min(begin + std::strlen("\n  "), parts[2].size());
    const size_t end = std::min(parts[2].find("\n  ", begin), parts[2].size());
    ending.error->detail(parts[2].substr(begin, end - begin));
    begin = end;
  }
  if (!parts[3].empty()) ending.error->hint(parts[3]);
  return ending;
}

/// Which rank met an error, and on which host; once.
void add_place(Error& error, const Ranks& ranks) {
  constexpr std::string_view words = "at rank ";
  if (error.details().find(concat("\n  ", words)) != std::string::npos) return;
  error.detail(concat(words, ranks.rank(), " of ", ranks.size(), ", on ", host_name()));
}

/// Of all endings the one that is told: the error of the lowest rank that came by itself, or else what interrupted it, or
/// else an error that came after others.
Ending worst(const std::vector<std::optional<Ending>>& endings) {
  Ending result = endings.front().value_or(Ending{});
  const auto choose = [&](const auto& matches) {
    for (const auto& ending : endings) {
      if (ending && matches(*ending)) {
        result = *ending;
        return true;
      }
    }
    return false;
  };
  choose([](const Ending& each) { return each.error && !each.stopped; }) ||
      choose([](const Ending& each) { return each.signal != 0; }) ||
      choose([](const Ending& each) { return each.error.has_value(); });
  return result;
}

}  // namespace

/// What can be said at any time: all calls of the library are made under one lock, by whatever thread.
struct Ranks::Impl {
  explicit Impl(Transport& transport_) : transport(transport_), underway(static_cast<size_t>(transport.size())) {}

  /// A message that has been handed over, as its size and then pieces.
  struct Outgoing {
    uint64_t size = 0;
    std::string bytes;
    std::vector<Transport::Request*> requests;
  };

  bool stop_waits() {
    const std::lock_guard lock(mutex);
    return transport.waiting(-1, stop_tag).has_value();
  }

  /// By whoever computes, from time to time.
  void look_for_failure() {
    const auto now = Clock::now().time_since_epoch().count();
    auto last = looked.load();
    constexpr auto pause = std::chrono::duration_cast<Clock::duration>(milliseconds(20)).count();
    if (ended || now - last < pause || !looked.compare_exchange_strong(last, now)) return;
    if (lost() >= 0) throw lost_error();
    if (!stop_waits()) return;
    // Others hear of it now, before this rank takes away what they work on.
    if (transport.rank() == 0) stop_all();
    throw Stopped();
  }

  /// The rank that nothing is heard of any more; −1: none.
  int lost() const noexcept { return pulse ? pulse->lost() : -1; }
  Error lost_error() const { return pulse->lost_error(); }

  /// By the pulse, where the work of this rank hangs while another one is lost.
  void give_up() {
    const Error error = lost_error();
    {
      const std::lock_guard lock(speaking);
      if (std::exchange(concluded, true)) return;
      if (speaks_of_the_lost()) std::fprintf(stderr, "error: %s\n", error.what());
    }
    if (transport.rank() != 0 && speaks_of_the_lost()) tell(0, told_tag, {});
    wait_for_the_speaker();
    transport.abort(describe(error.code()).exit_status);
  }
  /// Where the first rank is lost the next one speaks for all.
  bool speaks_of_the_lost() const { return transport.rank() == (lost() == 0 ? 1 : 0); }

  /// Once a signal is noted, in the thread that waited for it: launchers do not wait for work that hangs, or that is slow.
  void speak_in_time(int signal) {
    std::unique_lock lock(speaking);
    if (spoken.wait_for(lock, time_for_work, [&] { return concluded; })) return;
    Ending ending{.signal = signal};
    if (lost() >= 0) ending.error = lost_error();
    const int speaker = lost() == 0 ? 1 : 0;
    const bool tells = transport.rank() == speaker && !has_been_told();
    concluded = tells;
    const LastWords words = last_words;
    if (tells && speaker != 0) tell(0, told_tag, {});
    if (words != nullptr) words(ending, tells);
  }

  /// What `words` return, or `otherwise` where the end of the run has been told.
  template <class Words>
  int say(const Words& words, int otherwise) {
    const std::lock_guard lock(speaking);
    if (std::exchange(concluded, true)) return otherwise;
    spoken.notify_all();
    return words();
  }

  /// By another rank, in a message that nobody has looked at.
  bool has_been_told() {
    const std::lock_guard lock(mutex);
    return transport.waiting(-1, verdict_tag).has_value() || transport.waiting(-1, told_tag).has_value();
  }

  /// Whoever ends first ends all, those that have not spoken yet among them.
  void wait_for_the_speaker() const {
    if (lost() >= 0 && !speaks_of_the_lost()) std::this_thread::sleep_for(milliseconds(3'000));
  }

  /// By the first rank.
  void stop_all() {
    if (told_to_stop.exchange(true)) return;
    for (int to = 1; to < transport.size(); ++to) tell(to, stop_tag, {});
  }

  /// Returns once `ready()`, which is asked under the lock; false at the deadline.
  template <class Ready>
  bool wait(const Ready& ready, std::optional<Clock::time_point> deadline = {}) {
    for (int round = 0;; ++round) {
      {
        const std::lock_guard lock(mutex);
        if (ready()) return true;
      }
      if (!ended) check_interrupt();
      if (deadline && Clock::now() >= *deadline) return false;
      constexpr int quick = 64;
      if (round >= quick) std::this_thread::sleep_for(std::chrono::microseconds(std::min(1000, 20 * (round - quick))));
    }
  }

  void send(int to, std::string bytes) {
    auto& message = underway[static_cast<size_t>(to)];
    wait([&] {
      std::erase_if(message.requests, [&](auto* request) { return transport.done(request); });
      return message.requests.empty();
    });
    message.bytes = std::move(bytes);
    message.size = message.bytes.size();
    const std::lock_guard lock(mutex);
    const auto* const data = reinterpret_cast<const std::byte*>(message.bytes.data());
    message.requests.push_back(
        transport.send(to, data_tag, reinterpret_cast<const std::byte*>(&message.size), sizeof message.size));
    for (size_t begin = 0; begin < message.size; begin += Transport::most) {
      const size_t size = std::min<size_t>(Transport::most, message.size - begin);
      message.requests.push_back(transport.send(to, data_tag, data + begin, size));
    }
    if (pulse) pulse->wake();
  }

  /// Whether messages are on their way still.
  bool move_messages() {
    const std::lock_guard lock(mutex);
    bool moving = false;
    for (auto& message : underway) {
      std::erase_if(message.requests, [&](auto* request) { return transport.done(request); });
      moving = moving || !message.requests.empty();
    }
    return moving;
  }

  std::string receive(int from) {
    uint64_t size = 0;
    receive_into(from, reinterpret_cast<std::byte*>(&size), sizeof size);
    std::string bytes(size, '\0');
    for (size_t begin = 0; begin < size; begin += Transport::most) {
      receive_into(from, reinterpret_cast<std::byte*>(bytes.data()) + begin,
                   std::min<size_t>(Transport::most, size - begin));
    }
    return bytes;
  }

  /// Begun only when the message is there: memory that an exception takes away must not be written to later.
  void receive_into(int from, std::byte* data, size_t size) {
    Transport::Request* request = nullptr;
    wait([&] {
      if (!transport.waiting(from, data_tag)) return false;
      request = transport.receive(from, data_tag, data, size);
      return true;
    });
    constexpr int quick = 1 << 12;  // its bytes come as fast as the library is called
    for (int round = 0;; ++round) {
      {
        const std::lock_guard lock(mutex);
        if (transport.done(request)) return;
      }
      if (round < quick)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  /// Small messages, which are gone as soon as they are handed over.
  void tell(int to, int tag, std::string text) {
    const std::lock_guard lock(mutex);
    told.push_back(std::make_unique<std::string>(std::move(text)));
    const auto& kept = *told.back();
    transport.send(to, tag, reinterpret_cast<const std::byte*>(kept.data()), kept.size());
  }

  /// A small message that is there.
  void take(int from, int tag, std::string& text) {
    auto* const request = transport.receive(from, tag, reinterpret_cast<std::byte*>(text.data()), text.size());
    while (!transport.done(request)) std::this_thread::yield();
  }

  Transport& transport;
  std::mutex mutex;
  std::vector<Outgoing> underway;  ///< by the rank that they go to
  std::vector<std::unique_ptr<std::string>> told;
  std::atomic<Clock::rep> looked{0};
  std::atomic<bool> ended{false}, told_to_stop{false};
  std::mutex speaking;  ///< held by whoever says how the run ended
  std::condition_variable spoken;
  bool concluded = false;      ///< guarded by it: that has been said, or is for another rank to say
  std::optional<Pulse> pulse;  ///< of ranks that a launcher started
};

void Ranks::look_for_failure() { world().impl_->look_for_failure(); }

Ranks::Ranks() = default;
Ranks::Ranks(Transport& transport)
    : rank_(transport.rank()), size_(transport.size()), impl_(std::make_unique<Impl>(transport)) {}
Ranks::~Ranks() = default;

void Ranks::send(int to, std::string bytes) { impl_->send(to, std::move(bytes)); }
std::string Ranks::receive(int from) { return impl_->receive(from); }

void Ranks::stop_others() noexcept try {
  if (impl_ != nullptr && first()) impl_->stop_all();
} catch (const std::exception&) {  // they notice when what they work on is gone
}

void Ranks::barrier() {
  gather({});
  broadcast({});
}

/// Down a tree: rank r hears of r without its lowest bit, counted from the one that speaks.
std::string Ranks::broadcast(std::string bytes, int from) {
  const int own = (rank_ - from + size_) % size_;
  int bit = 1;
  while (bit < size_ && (own & bit) == 0) bit *= 2;
  if (own != 0) bytes = receive((own - bit + from) % size_);
  for (bit /= 2; bit > 0; bit /= 2) {
    if (own + bit < size_) send((own + bit + from) % size_, bytes);
  }
  return bytes;
}

std::vector<std::string> Ranks::gather(std::string bytes) {
  std::vector<std::string> all;
  if (!first()) {
    send(0, std::move(bytes));
    return all;
  }
  all.push_back(std::move(bytes));
  for (int from = 1; from < size_; ++from) all.push_back(receive(from));
  return all;
}

std::vector<std::string> Ranks::gather_everywhere(std::string bytes) {
  auto all = gather(std::move(bytes));
  all.resize(static_cast<size_t>(size_));
  for (auto& each : all) each = broadcast(std::move(each));
  return all;
}

std::vector<std::string> Ranks::together(const std::function<std::string()>& own) {
  Ending ending;
  std::string bytes;
  try {
    bytes = own();
  } catch (const Error& error) {
    if (size_ == 1) throw;
    ending.error = error;
    add_place(*ending.error, *this);
  }
  for (const auto& each : gather_everywhere(joined(ending))) {
    if (const auto error = parsed(each).error) throw *error;
  }
  return gather_everywhere(std::move(bytes));
}

void Ranks::require_same(std::string_view what, std::string_view text) {
  const std::string expected = broadcast(std::string(text));
  if (expected == text) return;
  throw Error(ErrorCode::mismatch, concat("the ranks differ in ", what))
      .detail(concat("rank 0 has ", printable(expected)))
      .detail(concat("rank ", rank_, " has ", printable(text), ", on ", host_name()));
}

Ranks& world() noexcept {
  static Ranks& ranks = *new Ranks;  // never destroyed: signals come until the end
  return ranks;
}

void set_last_words(LastWords words) noexcept {
  last_words = words;
  set_interrupt_listener(&Ranks::speak_in_time);
}

/// Nobody has anybody to ask while they join.
void Ranks::speak_in_time(int signal) {
  if (auto* const impl = joined_.load()) return impl->speak_in_time(signal);
  const auto found = launched();
  const LastWords words = last_words;
  if (!found || words == nullptr) return;
  std::this_thread::sleep_for(time_for_work);
  if (joined_ == nullptr) words({.signal = signal}, found->rank == 0);
}

std::atomic<Ranks::Impl*> Ranks::joined_{nullptr};

void start() {
  const auto found = launched();
  if (!found) return;
  Ranks& ranks = world();
  ranks.impl_ = std::make_unique<Ranks::Impl>(connect(*found));
  ranks.rank_ = ranks.impl_->transport.rank();
  ranks.size_ = ranks.impl_->transport.size();
  ranks.impl_->pulse.emplace(ranks.impl_->transport, ranks.impl_->mutex, pulse_tag, pulse_patience(),
                             Pulse::Duties{[impl = ranks.impl_.get()] { return impl->move_messages(); },
                                           [impl = ranks.impl_.get()] { impl->give_up(); }});
  set_interrupt_check(&Ranks::look_for_failure);
  Ranks::joined_ = ranks.impl_.get();
}

namespace {

/// What is told where a rank is gone without a word.
Error no_answer(const std::vector<std::optional<Ending>>& endings) {
  std::vector<std::string> missing;
  for (size_t rank = 0; rank < endings.size(); ++rank) {
    if (!endings[rank]) missing.push_back(concat(rank));
  }
  return Error(ErrorCode::internal, concat("of ", endings.size(), " ranks some have ended without an answer"))
      .detail("ranks " + join(missing));
}

int status_of(const Ending& ending) {
  if (ending.error) return describe(ending.error->code()).exit_status;
  return ending.signal != 0 ? 128 + ending.signal : ending.status;
}

}  // namespace

/// The first rank hears how all ended, and tells them how the run did.
class Ranks::Farewell {
 public:
  Farewell(Ranks& ranks, Ending own) : ranks_(ranks), impl_(*ranks.impl_), own_(std::move(own)) {
    impl_.ended = true;
    own_.stopped = own_.stopped || (own_.error && impl_.lost() < 0 && follows_another());
    if (own_.error) add_place(*own_.error, ranks);
    // Of several that a launcher ends the first one speaks; one that alone got a signal waits until it does.
    const bool hurries = own_.signal != 0 && ranks.first();
    if (!own_.good()) fail(hurries ? patience_with_signals : ranks.first() ? patience : patience_for_the_verdict);
  }

  bool answered() const noexcept { return answered_; }

  Ending hear_verdict() {
    if (failed_ && !own_.stopped) impl_.tell(0, stop_tag, {});
    // A first rank that was stopped wakes when the launcher ends it, and must not say the same again.
    own_.tells = impl_.lost() < 0 || !impl_.speaks_of_the_lost();
    impl_.tell(0, ending_tag, joined(own_));
    const auto verdict = hear(verdict_tag);
    answered_ = verdict.has_value();
    Ending all = answered_ ? parsed(verdict->text) : own_;
    if (!answered_ && impl_.lost() >= 0 && !all.error) all.error = impl_.lost_error();
    const bool knows = all.error || all.signal != 0;
    all.tells = !answered_ && knows && (impl_.lost() < 0 || impl_.speaks_of_the_lost());
    if (all.tells) impl_.tell(0, told_tag, {});
    return all;
  }

  Ending give_verdict() {
    if (failed_) impl_.stop_all();
    std::vector<std::optional<Ending>> endings(static_cast<size_t>(ranks_.size()));
    endings.front() = own_;
    int missing = ranks_.size() - 1;
    // One that is gone is not waited for.
    const auto gone = [&] { return impl_.lost() >= 0 && !endings[static_cast<size_t>(impl_.lost())]; };
    for (; missing > (gone() ? 1 : 0); --missing) {
      const auto heard = hear(ending_tag);
      if (!heard) break;
      auto& ending = endings[static_cast<size_t>(heard->from)];
      ending = parsed(heard->text);
      if (!ending->good() && !failed_) {
        fail(patience);
        impl_.stop_all();
      }
    }
    answered_ = missing == 0;
    Ending all = worst(endings);
    if (!all.error && impl_.lost() >= 0) all.error = impl_.lost_error();
    const bool untold = all.stopped || !answered_;
    if (untold && !all.error && all.signal == 0) all.error = no_answer(endings);
    all.tells =
        std::ranges::all_of(endings, [](const auto& each) { return !each || each->tells; }) && !impl_.has_been_told();
    return all;
  }

  void tell_verdict(const Ending& all) {
    for (int to = 1; to < ranks_.size(); ++to) impl_.tell(to, verdict_tag, joined(all));
  }

 private:
  /// An error may be of what another rank has just taken away: whoever did so has said why before.
  bool follows_another() {
    const auto deadline = Clock::now() + milliseconds(300);
    return impl_.wait([&] { return impl_.transport.waiting(-1, stop_tag).has_value(); }, deadline);
  }

  struct Heard {
    int from = 0;
    std::string text;
  };

  void fail(milliseconds wait) {
    const auto deadline = Clock::now() + wait;
    deadline_ = failed_ ? std::min(deadline_, deadline) : deadline;
    failed_ = true;
  }

  /// The first rank waits some time for the others, these wait for nothing but what the first has said already.
  void hurry() {
    hurries_ = true;
    fail(ranks_.first() ? patience_with_the_lost : milliseconds(0));
  }

  /// Waits as long as all is well, since others may work on, and for some time once one has failed.
  std::optional<Heard> hear(int tag) {
    Heard heard;
    while (true) {
      const bool known = failed_;
      bool there = false;
      const auto ready = [&] {
        const auto found = impl_.transport.waiting(-1, tag);
        if (!found && !hurries_ && impl_.lost() >= 0) return true;
        if (!found) return !known && impl_.transport.waiting(-1, stop_tag).has_value();
        heard = {found->from, std::string(found->size, '\0')};
        impl_.take(heard.from, tag, heard.text);
        return there = true;
      };
      const bool in_time = impl_.wait(ready, known ? std::optional(deadline_) : std::nullopt);
      if (there) return heard;
      if (!in_time) return std::nullopt;
      if (impl_.lost() >= 0) {
        hurry();
      } else {
        fail(ranks_.first() ? patience : patience_for_the_verdict);
      }
      if (ranks_.first()) impl_.stop_all();
    }
  }

  Ranks& ranks_;
  Impl& impl_;
  Ending own_;
  bool failed_ = false, hurries_ = false, answered_ = false;
  Clock::time_point deadline_;
};

int end_together(Ending own, const std::function<int(const Ending&)>& conclude) {
  Ranks& ranks = world();
  if (ranks.impl_ == nullptr) return conclude(own);
  Ranks::Farewell farewell(ranks, std::move(own));
  const Ending all = ranks.first() ? farewell.give_verdict() : farewell.hear_verdict();
  auto& transport = ranks.impl_->transport;
  // Told before any rank ends: a launcher ends all others once one has ended with a bad status.
  const int status = ranks.impl_->say([&] { return all.tells ? conclude(all) : status_of(all); }, status_of(all));
  if (ranks.first()) farewell.tell_verdict(all);
  if (!farewell.answered()) ranks.impl_->wait_for_the_speaker();
  ranks.impl_->pulse.reset();
  if (farewell.answered()) transport.finish();
  if (!farewell.answered()) transport.abort(status);
  return status;
}

}  // namespace w4q::ranks
