#include "core/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/interrupt.h"
#include "core/terminal.h"
#include "core/text.h"

namespace w4q {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> enabled{true};
ProgressListener listener;
constexpr size_t longest_bar = 28, shortest_bar = 6;
/// A share of the work below which nobody can tell how long the rest takes: small tensors come first.
constexpr double least_known = 0.005;

Clock::duration interval(bool terminal) {
  return terminal || listener ? Clock::duration(std::chrono::milliseconds(100))
                              : Clock::duration(std::chrono::seconds(5));
}

std::string amount(int64_t value, std::string_view unit) {
  if (unit == "bytes") return human_bytes(value);
  return concat(value, " ", unit);
}

/// "140 MB/s", "12.5 tensors/s", "4.2 s each".
std::string rate_text(double per_second, std::string_view unit) {
  if (unit == "bytes") return human_bytes(static_cast<int64_t>(per_second)) + "/s";
  if (per_second < 1) return human_seconds(1 / per_second) + " each";
  return concat(fixed(per_second, per_second < 10 ? 1 : 0), " ", unit, "/s");
}

/// As much of a bar as fits in `columns`; empty: none does.
std::string bar(double fraction, size_t columns) {
  constexpr size_t frame = 3;  // brackets and a blank
  if (columns < shortest_bar + frame) return {};
  const size_t width = std::min(longest_bar, columns - frame);
  const auto filled = static_cast<size_t>(fraction * static_cast<double>(width));
  return concat("[", std::string(filled, '#'), std::string(width - filled, '.'), "] ");
}

}  // namespace

void set_progress_enabled(bool value) noexcept { enabled = value; }

void set_progress_listener(ProgressListener value) { listener = std::move(value); }

Progress::Progress(std::string label, int64_t total, std::string_view unit)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      unit_(unit),
      terminal_(is_terminal(STDERR_FILENO)),
      start_(Clock::now()),
      next_draw_(start_ + interval(terminal_)) {
  if (listener) tell(0);
}

Progress::~Progress() {
  if (listener) {
    tell(done_);
    return;
  }
  // A finished bar gives its line back; a plain log keeps what it said.
  if (terminal_ && drawn_) std::fputs("\r\033[K", stderr);
}

void Progress::advance(int64_t step) {
  check_interrupt();
  const int64_t done = done_.fetch_add(step) + step;
  if (!enabled && !listener) return;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (now < next_draw_) return;
  next_draw_ = now + interval(terminal_);
  if (listener) {
    tell(done);
  } else {
    draw(done, now);
  }
}

void Progress::tell(int64_t done) const { listener({label_, std::min(done, total_), total_, unit_}); }

void Progress::draw(int64_t done, Clock::time_point now) {
  const double fraction = std::min(1.0, static_cast<double>(done) / static_cast<double>(total_));
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = fraction >= least_known ? human_seconds(elapsed / fraction - elapsed) : "?";
  const std::string text = concat(fixed(fraction * 100, 0), " %, ", amount(done, unit_), " of ", amount(total_, unit_),
                                  ", ", rate_text(static_cast<double>(done) / elapsed, unit_), ", ", left, " left");
  if (terminal_) {
    const size_t columns = terminal_width(STDERR_FILENO) - 1;  // the cursor stands in the last one
    const size_t used = display_width(label_) + 1 + display_width(text);
    const std::string line = concat(label_, " ", bar(fraction, columns - std::min(columns, used)), text);
    std::fprintf(stderr, "\r\033[K%s", clipped(line, columns).c_str());
  } else {
    std::fprintf(stderr, "%s: %s\n", label_.c_str(), text.c_str());
  }
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace w4q
