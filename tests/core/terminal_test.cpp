#include "core/terminal.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/progress.h"

namespace w4q {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// What is written to stderr while this lives: into a terminal of so many columns, or into a pipe.
class Captured {
 public:
  explicit Captured(unsigned short columns) {
    winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    std::array<int, 2> ends{};
    const bool made = columns > 0 ? openpty(&ends[0], &ends[1], nullptr, nullptr, &size) == 0 : pipe(ends.data()) == 0;
    EXPECT_TRUE(made);
    std::fflush(stderr);
    before_ = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    read_ = ends[0];
    fcntl(read_, F_SETFL, O_NONBLOCK);
  }
  ~Captured() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(read_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  std::string text() const {
    std::fflush(stderr);
    std::array<char, 4096> buffer{};
    const ssize_t count = read(read_, buffer.data(), buffer.size());
    return {buffer.data(), static_cast<size_t>(std::max<ssize_t>(count, 0))};
  }

 private:
  int before_ = -1, read_ = -1;
};

/// An environment variable for as long as this lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    setenv(name, value, 1);
  }
  ~Variable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
};

/// A piece of work that has done a quarter when it has something to say on a terminal.
std::string drawn(const Captured& captured) {
  Progress progress("quantize", 4'000'000, "bytes");
  std::this_thread::sleep_for(std::chrono::milliseconds(110));
  progress.advance(1'000'000);
  return captured.text();
}

TEST(Progress, IsOneLineWithRateAndRestOnATerminal) {
  const Variable term("TERM", "xterm");
  const Captured captured(100);
  const std::string line = drawn(captured);
  EXPECT_THAT(line, StartsWith("\r\033[Kquantize [#######....................."));
  EXPECT_THAT(line, HasSubstr("25 %, 1.00 MB of 4.00 MB, "));
  EXPECT_THAT(line, HasSubstr(" MB/s, "));
  EXPECT_THAT(line, HasSubstr(" left"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_EQ(captured.text(), "\r\033[K") << "gives its line back";
}

TEST(Progress, DoesNotGuessTheRestFromHardlyAnything) {
  const Variable term("TERM", "xterm");
  const Captured captured(100);
  Progress progress("quantize", 4'000'000, "bytes");
  std::this_thread::sleep_for(std::chrono::milliseconds(110));
  progress.advance(4'000);
  EXPECT_THAT(captured.text(), HasSubstr("? left"));
}

TEST(Progress, FitsIntoANarrowTerminal) {
  const Variable term("TERM", "xterm");
  for (const unsigned short columns : {20, 40, 60, 72, 80}) {
    const Captured captured(columns);
    const std::string line = drawn(captured).substr(4);
    EXPECT_LT(display_width(line), columns) << line;
  }
}

TEST(Progress, IsPlainLinesInALogAndOnADumbTerminal) {
  for (const bool dumb : {false, true}) {
    const Variable term("TERM", dumb ? "dumb" : "xterm");
    const Captured captured(dumb ? 80 : 0);
    EXPECT_EQ(drawn(captured), "") << "the first line of a log comes after five seconds";
  }
}

TEST(Terminal, ColoursAreForTerminalsAndNotWhereNoColorIsSet) {
  const Variable term("TERM", "xterm");
  EXPECT_FALSE(takes_colours(-1));
  const Captured captured(80);
  {
    const Variable none("NO_COLOR", "1");
    EXPECT_FALSE(takes_colours(STDERR_FILENO));
  }
  const Variable empty("NO_COLOR", "");  // as if it were not there: no-color.org
  EXPECT_TRUE(takes_colours(STDERR_FILENO));
  EXPECT_EQ(terminal_width(STDERR_FILENO), 80u);
}

TEST(Terminal, ColoursTheWordsThatSayHowItWent) {
  EXPECT_EQ(coloured_lines("pass  digests: 3\nFAIL  base: x\nplain\n"),
            "\033[32mpass\033[0m  digests: 3\n\033[31mFAIL\033[0m  base: x\nplain\n");
  EXPECT_EQ(coloured_lines("note: a pass  b"), "\033[33mnote\033[0m: a pass  b");
}

TEST(Terminal, ClipsBetweenCharacters) {
  EXPECT_EQ(clipped("a→b", 2), "a→");
  EXPECT_EQ(clipped("a→b", 9), "a→b");
  EXPECT_EQ(display_width("a→b"), 3u);
}

}  // namespace
}  // namespace w4q
