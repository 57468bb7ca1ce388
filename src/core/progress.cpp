#include "core/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/interrupt.h"
#include "core/text.h"

namespace w4q {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> enabled{true};
constexpr auto terminal_interval = std::chrono::milliseconds(100);
constexpr auto plain_interval = std::chrono::seconds(5);
constexpr int bar_width = 28;

std::string amount(int64_t value, std::string_view unit) {
  if (unit == "bytes") return human_bytes(value);
  return concat(value, " ", unit);
}

std::string bar(double fraction) {
  const int filled = static_cast<int>(fraction * bar_width);
  return concat("[", std::string(static_cast<size_t>(filled), '#'),
                std::string(static_cast<size_t>(bar_width - filled), '.'), "]");
}

}  // namespace

void set_progress_enabled(bool value) noexcept { enabled = value; }

Progress::Progress(std::string label, int64_t total, std::string_view unit)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      unit_(unit),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      next_draw_(start_ + (terminal_ ? Clock::duration(terminal_interval) : Clock::duration(plain_interval))) {}

Progress::~Progress() {
  // A finished bar gives its line back; a plain log keeps what it said.
  if (terminal_ && drawn_) std::fputs("\r\033[K", stderr);
}

void Progress::advance(int64_t step) {
  check_interrupt();
  const int64_t done = done_.fetch_add(step) + step;
  if (!enabled) return;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (now < next_draw_) return;
  next_draw_ = now + (terminal_ ? Clock::duration(terminal_interval) : Clock::duration(plain_interval));
  draw(done, now);
}

void Progress::draw(int64_t done, Clock::time_point now) {
  const double fraction = std::min(1.0, static_cast<double>(done) / static_cast<double>(total_));
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = fraction > 0 ? human_seconds(elapsed / fraction - elapsed) : "?";
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s %s %3.0f %%  %s of %s, %s left", label_.c_str(), bar(fraction).c_str(),
                 fraction * 100, amount(done, unit_).c_str(), amount(total_, unit_).c_str(), left.c_str());
  } else {
    std::fprintf(stderr, "%s: %.0f %%, %s of %s, %s left\n", label_.c_str(), fraction * 100,
                 amount(done, unit_).c_str(), amount(total_, unit_).c_str(), left.c_str());
  }
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace w4q
