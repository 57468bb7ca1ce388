#include "io/lost_pages.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <numeric>
#include <thread>

#include "io/checkpoint.h"
#include "io/mapped_file.h"
#include "io/output.h"
#include "make.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

constexpr size_t pages = 64, page = 4096;

uint64_t sum_of(std::span<const std::byte> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0},
                         [](uint64_t sum, std::byte b) { return sum + static_cast<uint8_t>(b); });
}

/// Each in a process of its own: the handler is the process'.
int statuses(const std::function<int()>& body) { return wait_for(in_child(body)); }

TEST(LostPages, AreZerosAndAnErrorFromThenOn) {
  const TemporaryFolder folder;
  const fs::path path = folder / "x";
  put(path, std::string(pages * page, '\1'));
  EXPECT_EQ(statuses([&] {
              survive_lost_pages();
              const MappedFile file(path, true);
              fs::resize_file(path, 10 * page);
              if (sum_of(file.bytes()) != 10 * page) return 1;
              expect_error(ErrorCode::bad_file, {"x: was changed while it was read", "262144 bytes", "40960 now"},
                           [&] { file.check(); });
              expect_error(ErrorCode::bad_file, {"x: was changed"}, [] { refuse_changed_inputs(); });
              return testing::Test::HasFailure() ? 2 : 0;
            }),
            0);
}

TEST(LostPages, InAllThreads) {
  const TemporaryFolder folder;
  const fs::path path = folder / "x";
  put(path, std::string(pages * page, '\1'));
  EXPECT_EQ(statuses([&] {
              survive_lost_pages();
              const MappedFile file(path, true);
              fs::resize_file(path, 0);
              // Not OpenMP's: those do not survive a fork.
              std::vector<std::thread> threads;
              for (size_t i = 0; i < 8; ++i) {
                threads.emplace_back([&, i] {
                  if (sum_of(file.bytes().subspan(i * page, 8 * page)) != 0) std::_Exit(1);
                });
              }
              for (auto& thread : threads) thread.join();
              expect_error(ErrorCode::bad_file, {"x: was changed while it was read"}, [&] { file.check(); });
              return testing::Test::HasFailure() ? 2 : 0;
            }),
            0);
}

TEST(LostPages, OthersGoToTheHandlerThatWasThereBefore) {
  const TemporaryFolder folder;
  const fs::path path = folder / "x";
  put(path, std::string(2 * page, '\1'));
  const auto touch_foreign = [&] {
    const FileDescriptor file = open_file(path, O_RDONLY);
    void* const data = ::mmap(nullptr, 2 * page, PROT_READ, MAP_SHARED, file.get(), 0);
    fs::resize_file(path, 0);
    return static_cast<int>(*static_cast<volatile char*>(data));
  };
  EXPECT_EQ(statuses([&] {
              survive_lost_pages();
              return touch_foreign();
            }),
            -SIGBUS);
  put(path, std::string(2 * page, '\1'));
  EXPECT_EQ(statuses([&] {
              ::signal(SIGBUS, [](int) { std::_Exit(77); });
              survive_lost_pages();
              return touch_foreign();
            }),
            77);
  EXPECT_EQ(statuses([&] {
              survive_lost_pages();
              ::raise(SIGBUS);
              return 0;
            }),
            -SIGBUS);
}

TEST(LostPages, AProgramMayHaveItsOwnHandler) {
  const TemporaryFolder folder;
  const fs::path path = folder / "x";
  put(path, std::string(2 * page, '\1'));
  EXPECT_EQ(statuses([&] {
              struct sigaction action {};
              action.sa_flags = SA_SIGINFO;
              action.sa_sigaction = [](int, siginfo_t* info, void*) {
                if (!replace_lost_pages(info->si_addr)) std::_Exit(1);
              };
              ::sigaction(SIGBUS, &action, nullptr);
              const MappedFile file(path);
              fs::resize_file(path, 0);
              return sum_of(file.bytes()) == 0 ? 0 : 2;
            }),
            0);
}

/// The system reads it by itself, and there is no signal.
TEST(LostPages, AreNamedWhenTheyAreWrittenElsewhere) {
  const TemporaryFolder folder;
  put(folder / "x", std::string(2 * page, '\1'));
  const MappedFile file(folder / "x");
  fs::resize_file(folder / "x", 0);
  const FileDescriptor to = open_file(folder / "to", O_WRONLY | O_CREAT);
  expect_error(ErrorCode::bad_file, {"x: was changed while it was read", "0 now"},
               [&] { write_all(to, file.bytes(), 0, folder / "to"); });
}

TEST(LostPages, ALoadedTensorIsWhole) {
  const TemporaryFolder folder;
  put(folder / "m/model.safetensors", container({{"a", noise(page, 1)}, {"b", noise(50 * page, 2)}}));
  EXPECT_EQ(statuses([&] {
              survive_lost_pages();
              const auto checkpoint = Checkpoint::open(folder / "m");
              fs::resize_file(folder / "m/model.safetensors", 3 * page);
              if (sum_of(checkpoint.load("b")->bytes) == 0) return 1;
              expect_error(ErrorCode::bad_file, {"model.safetensors: was changed"}, [&] { checkpoint.load("a"); });
              return testing::Test::HasFailure() ? 2 : 0;
            }),
            0);
}

class ChangedInput : public ::testing::Test {
 protected:
  ChangedInput() {
    put(model_ / "model.safetensors", container({{"a", noise(100, 1)}}));
    put(model_ / "config.json", "{}");
    put(model_ / "README.md", "words");
    put(model_ / "residual/model.safetensors", container({{"b", noise(100, 1)}}));
    put(folder_ / "calibration.txt", "text");
  }

  /// Commits after `change`; expects that `named` is the reason not to, or none when it is empty.
  void expect_commit(const char* named, const std::function<void()>& change) {
    OutputFolder output(folder_ / "out", false, {model_, folder_ / "calibration.txt"},
                        [](const auto&) { return true; });
    put(output.staging() / "x", "x");
    change();
    if (named == std::string()) return output.commit();
    expect_error(ErrorCode::bad_file, {named, "was changed while it was read"}, [&] { output.commit(); });
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }

  TemporaryFolder folder_;
  fs::path model_ = folder_ / "m";
};

TEST_F(ChangedInput, IsNotCommitted) {
  const auto later = [](const fs::path& path) {
    fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
  };
  expect_commit("config.json", [&] { put(model_ / "config.json", "{ }"); });
  expect_commit("config.json", [&] { later(model_ / "config.json"); });
  expect_commit("model.safetensors", [&] { later(model_ / "model.safetensors"); });
  expect_commit("residual/model.safetensors", [&] { fs::remove(model_ / "residual/model.safetensors"); });
  expect_commit("calibration.txt", [&] { put(folder_ / "calibration.txt", "other"); });
  expect_commit("config.json", [&] {
    const auto time = fs::last_write_time(model_ / "config.json");
    put(folder_ / "new", "{ }");
    fs::rename(folder_ / "new", model_ / "config.json");
    fs::last_write_time(model_ / "config.json", time);
  });
  put(model_ / "residual/model.safetensors", container({{"b", noise(100, 1)}}));
  // What was mapped before the output was begun.
  const auto checkpoint = Checkpoint::open(model_);
  later(model_ / "model.safetensors");
  expect_commit("model.safetensors", [] {});
}

TEST_F(ChangedInput, NotesOnTheModelAreNone) {
  expect_commit("", [&] {
    put(model_ / "README.md", "other words");
    put(model_ / "log.json.new", "a new file");
  });
  EXPECT_TRUE(fs::exists(folder_ / "out/x"));
}

/// What was made of it is in its place.
TEST_F(ChangedInput, AfterTheCommitIsNone) {
  const auto checkpoint = Checkpoint::open(model_);
  expect_commit("", [] {});
  fs::last_write_time(model_ / "model.safetensors", fs::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_NO_THROW(refuse_changed_inputs());
}

}  // namespace
}  // namespace w4q::io
