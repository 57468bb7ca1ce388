// Paths and small helpers that every test folder uses.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/error.h"

namespace w4q::test {

/// testdata/ of the repository.
inline std::filesystem::path testdata() { return W4Q_TESTDATA; }

/// Checkpoints and corpora that stand beside the repository on the project's own machines; empty where they are
/// missing.
inline std::filesystem::path shared_data() {
  const char* variable = std::getenv("W4Q_SHARED");
  const std::filesystem::path path = variable ? variable : W4Q_SHARED;
  return std::filesystem::exists(path / "models") ? path : std::filesystem::path{};
}

/// Skips the test, and says so, when the data beside the repository is missing.
#define W4Q_NEEDS_SHARED_DATA()         \
  if (w4q::test::shared_data().empty()) \
  GTEST_SKIP() << "needs the reference data that stands beside the repository (set W4Q_SHARED)"

/// A folder of this test's own that is removed afterwards.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            ("w4q-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Runs `action`, expects an Error of `code` whose message contains every one of `parts`.
template <class Action>
void expect_error(ErrorCode code, std::initializer_list<std::string_view> parts, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(describe(error.code()).name, describe(code).name) << error.what();
    for (const auto part : parts) {
      EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
          << "message lacks \"" << part << "\":\n"
          << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no error was thrown";
}

}  // namespace w4q::test
