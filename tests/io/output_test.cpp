#include "io/output.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/interrupt.h"
#include "io/partial.h"
#include "make.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

bool anything(const fs::path& /*folder*/) { return true; }
bool nothing(const fs::path& /*folder*/) { return false; }

void write_folder(const fs::path& target, bool overwrite, std::string_view text) {
  OutputFolder output(target, overwrite, {}, anything);
  for (const auto* name : {"a", "b", "sub/c"}) put(output.staging() / name, text);
  output.commit();
}

/// Wherever they lie, and whenever they were copied there.
TEST(InputStates, CopiesBeginAlikeAndOthersDoNot) {
  const TemporaryFolder folder;
  const std::string large(3 << 20, 'x');
  for (const char* name : {"here", "there"}) {
    put(folder / name / "config.json", "{}");
    put(folder / name / "model.safetensors", large);
    put(folder / name / "README.md", name);  // tells no meaning
  }
  const auto lines = [&](const char* name) { return InputStates({folder / name}).beginnings(); };
  ASSERT_EQ(lines("here").size(), 2u);
  EXPECT_EQ(lines("here").front().find("config.json: 2 bytes, "), 0u);
  EXPECT_EQ(lines("here"), lines("there"));
  put(folder / "there" / "config.json", "[]");
  EXPECT_NE(lines("here"), lines("there"));
  put(folder / "there" / "config.json", "{}");
  put(folder / "there" / "model.safetensors", large + "x");
  EXPECT_NE(lines("here"), lines("there"));
}

/// As for a process that is about to be killed: what it has begun goes, and comes to its place no more.
TEST(TakenPartials, ComeToTheirPlacesNoMore) {
  const TemporaryFolder folder;
  OutputFolder taken_one(folder / "taken", false, {}, nothing), kept(folder / "kept", false, {}, nothing);
  kept.outlast();
  TakenPartials taken;
  OutputFolder later(folder / "later", false, {}, nothing);
  EXPECT_THROW(taken_one.commit(), Interrupted);
  taken.remove();
  EXPECT_FALSE(fs::exists(taken_one.staging()));
  kept.commit();
  later.commit();
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"kept", "later"}));
}

TEST(OthersPartial, GoesWithAnExceptionWhereNobodyHoldsIt) {
  const TemporaryFolder folder;
  const auto left = [](const fs::path& path) {
    try {
      const OthersPartial others(path);
      throw std::runtime_error("fails");
    } catch (const std::runtime_error&) {
      return fs::exists(path);
    }
  };
  const Partial held(folder / "held", Partial::Kind::folder);
  EXPECT_TRUE(left(held.path()));
  const auto dead = folder / ".q.w4q-partial-0123456789abcdef";
  fs::create_directory(dead);
  { const OthersPartial others(dead); }
  EXPECT_TRUE(fs::exists(dead));
  EXPECT_FALSE(left(dead));
}

TEST(OutputFolder, AppearsOnlyWhenCommitted) {
  const TemporaryFolder folder;
  {
    OutputFolder output(folder / "out", false, {}, nothing);
    put(output.staging() / "x", "1");
    EXPECT_EQ(output.staging().parent_path(), fs::canonical(folder.path()));
    EXPECT_TRUE(is_partial_name(output.staging().filename().native()));
    EXPECT_FALSE(fs::exists(folder / "out"));
    output.commit();
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"});
  }
  EXPECT_EQ(get(folder / "out/x"), "1");
  EXPECT_EQ(names_in(folder / "out"), std::vector<std::string>{"x"});
}

TEST(OutputFolder, LeavesNothingWhenNotCommitted) {
  const TemporaryFolder folder;
  { put(OutputFolder(folder / "out", false, {}, nothing).staging() / "x", "1"); }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(OutputFolder, ReplacesOnlyWhenAskedAndApproved) {
  const TemporaryFolder folder;
  write_folder(folder / "out", false, "old");
  put(folder / "out/extra", "old");
  expect_error(ErrorCode::bad_argument, {"out: already exists", "--overwrite"},
               [&] { OutputFolder(folder / "out", false, {}, anything); });
  expect_error(ErrorCode::bad_argument, {"not a former output"},
               [&] { OutputFolder(folder / "out", true, {}, nothing); });
  EXPECT_EQ(get(folder / "out/a"), "old");
  write_folder(folder / "out", true, "new");
  EXPECT_EQ(get(folder / "out/sub/c"), "new");
  EXPECT_FALSE(fs::exists(folder / "out/extra"));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"});
}

TEST(OutputFolder, LooksAtTheOldOneAgainBeforeItGoes) {
  const TemporaryFolder folder;
  write_folder(folder / "out", false, "old");
  OutputFolder output(folder / "out", true, {}, [](const fs::path& old) { return !fs::exists(old / "notes"); });
  put(folder / "out/notes", "written meanwhile");
  expect_error(ErrorCode::bad_argument, {"not a former output"}, [&] { output.commit(); });
  EXPECT_EQ(get(folder / "out/notes"), "written meanwhile");
  EXPECT_EQ(get(folder / "out/a"), "old");
}

TEST(OutputFolder, TakesAnySpellingOfATarget) {
  const TemporaryFolder folder;
  const auto before = fs::current_path();
  fs::current_path(folder.path());
  write_folder("one", false, "1");
  write_folder("./two/", false, "2");
  write_folder("one/../three//", false, "3");
  fs::create_directory_symlink("one", "link");
  write_folder("link", true, "4");
  fs::current_path(before);
  EXPECT_EQ(get(folder / "one/a"), "4") << "a link is followed, the folder behind it replaced";
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(get(folder / "two/a"), "2");
  EXPECT_EQ(get(folder / "three/a"), "3");
}

TEST(OutputFolder, RefusesImpossibleTargets) {
  const TemporaryFolder folder;
  put(folder / "file", "x");
  fs::create_symlink("nowhere", folder / "dangling");
  const auto refuses = [](const fs::path& target, ErrorCode code, std::initializer_list<std::string_view> parts) {
    expect_error(code, parts, [&] { OutputFolder(target, true, {}, anything); });
  };
  refuses("", ErrorCode::bad_argument, {"empty name"});
  refuses("/", ErrorCode::bad_argument, {"is not a name"});
  refuses(folder / "gone/out", ErrorCode::bad_file, {"gone: is not an existing folder", "mkdir -p"});
  refuses(folder / "file/out", ErrorCode::bad_file, {"file: is not an existing folder"});
  refuses(folder / "file", ErrorCode::bad_argument, {"is not a folder"});
  refuses(folder / "dangling", ErrorCode::bad_argument, {"link to something that does not exist"});
}

TEST(OutputFolder, NeverTouchesAnInput) {
  const TemporaryFolder folder;
  put(folder / "model/model.safetensors", "x");
  fs::create_directories(folder / "model/sub");
  fs::create_directory_symlink("model", folder / "alias");
  const auto refuses = [&](const fs::path& target, const fs::path& input, std::string_view part) {
    expect_error(ErrorCode::bad_argument, {part, "input: "}, [&] { OutputFolder(target, true, {input}, anything); });
  };
  refuses(folder / "model", folder / "model", "is the input");
  refuses(folder / "model/", folder / "alias", "is the input");
  refuses(folder / "alias", folder / "model", "is the input");
  refuses(folder / "model/out", folder / "model/", "lies in the input");
  refuses(folder.path(), folder / "model", "contains the input");
  refuses(folder / "model", folder / "model/model.safetensors", "contains the input");
  EXPECT_NO_THROW(OutputFolder(folder / "model2", true, {folder / "model"}, anything));
}

TEST(OutputFolder, LosesARaceForANewNameWithoutHarm) {
  const TemporaryFolder folder;
  OutputFolder output(folder / "out", false, {}, anything);
  put(output.staging() / "x", "mine");
  put(folder / "out/x", "theirs");
  expect_error(ErrorCode::bad_argument, {"out: already exists"}, [&] { output.commit(); });
  EXPECT_EQ(get(folder / "out/x"), "theirs");
}

TEST(OutputFolder, ReportsAnUnwritableFolder) {
  if (::geteuid() == 0) GTEST_SKIP() << "root can write everywhere";
  const TemporaryFolder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
  expect_error(ErrorCode::bad_file, {"Permission denied"}, [&] { OutputFolder(folder / "out", false, {}, nothing); });
  fs::permissions(folder.path(), fs::perms::owner_all);
}

TEST(OutputFolder, RemovesOnlyLeftoversOfDeadRuns) {
  const TemporaryFolder folder;
  OutputFolder living(folder / "out", false, {}, anything);
  const pid_t child = in_child([&] {
    OutputFolder doomed(folder / "out", false, {}, anything);
    put(doomed.staging() / "x", "1");
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  EXPECT_EQ(wait_for(child), -SIGKILL);
  put(folder / ".other.w4q-partial-0123456789abcdef/x", "of another output");
  EXPECT_EQ(names_in(folder.path()).size(), 3u);
  OutputFolder next(folder / "out", false, {}, anything);
  EXPECT_TRUE(fs::exists(living.staging()));
  EXPECT_EQ(names_in(folder.path()).size(), 3u) << "living, next and the other output's";
}

/// Kills a child that writes `round` after `round` over the target at a random moment, many times.
void kill_at_random_moments(const std::function<void(int round)>& write, const std::function<void()>& check) {
  for (uint64_t trial = 0; trial < 40; ++trial) {
    const pid_t child = in_child([&] {
      for (int round = 0;; ++round) write(round);
      return 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(500 + random_bits(11, trial) % 10'000));
    ::kill(child, SIGKILL);
    wait_for(child);
    check();
  }
}

TEST(OutputFolder, IsOldOrNewAndCompleteWheneverItsWriterIsKilled) {
  const TemporaryFolder folder;
  write_folder(folder / "out", false, "start");
  kill_at_random_moments(
      [&](int round) { write_folder(folder / "out", true, std::string(5000, static_cast<char>('a' + round % 26))); },
      [&] {
        const std::string text = get(folder / "out/a");
        ASSERT_TRUE(text == "start" || text.size() == 5000) << text.size();
        EXPECT_EQ(get(folder / "out/b"), text);
        EXPECT_EQ(get(folder / "out/sub/c"), text);
        EXPECT_EQ(names_in(folder / "out").size(), 3u);
      });
  write_folder(folder / "out", true, "end");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"}) << "leftovers of the killed are gone";
}

TEST(OutputFolder, ANewOneIsAbsentOrCompleteWheneverItsWriterIsKilled) {
  const TemporaryFolder folder;
  kill_at_random_moments([&](int round) { write_folder(folder / ("out" + std::to_string(round)), false, "text"); },
                         [&] {
                           for (const auto& entry : fs::directory_iterator(folder.path())) {
                             if (is_partial_name(entry.path().filename().native())) continue;
                             for (const auto* name : {"a", "b", "sub/c"}) EXPECT_EQ(get(entry.path() / name), "text");
                           }
                           for (const auto& entry : fs::directory_iterator(folder.path())) fs::remove_all(entry.path());
                         });
}

TEST(WriteFile, WritesNewFilesAndReplacesOnlyWhenAsked) {
  const TemporaryFolder folder;
  write_file(folder / "x", "one", false);
  EXPECT_EQ(get(folder / "x"), "one");
  expect_error(ErrorCode::bad_argument, {"x: already exists", "--overwrite"},
               [&] { write_file(folder / "x", "two", false); });
  EXPECT_EQ(get(folder / "x"), "one");
  write_file(folder / "x", "two", true);
  EXPECT_EQ(get(folder / "x"), "two");
  fs::create_symlink("x", folder / "link");
  write_file(folder / "link", "three", true);
  EXPECT_EQ(get(folder / "x"), "three");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"link", "x"}));
  expect_error(ErrorCode::bad_file, {"gone: is not an existing folder"},
               [&] { write_file(folder / "gone/x", "", true); });
  expect_error(ErrorCode::bad_argument, {"is a folder"}, [&] { write_file(folder.path(), "", true); });
  expect_error(ErrorCode::bad_argument, {"is not a name"}, [&] { write_file(folder / "new/", "", true); });
}

TEST(WriteFile, NeverReplacesAnInput) {
  const TemporaryFolder folder;
  for (const auto* name : {"model/a", "model/sub/b", "blobs/c", "text", "other"}) put(folder / name, "input");
  fs::create_symlink("../blobs/c", folder / "model/linked");
  fs::create_directory_symlink("model", folder / "alias");
  fs::create_symlink("text", folder / "link");
  const std::vector<fs::path> inputs{folder / "model/", folder / "text", "", folder / "gone", "/dev/null"};
  for (const auto* name :
       {"model/a", "model/sub/b", "model/linked", "alias/a", "model/sub/../a", "blobs/c", "text", "link"}) {
    SCOPED_TRACE(name);
    for (const bool overwrite : {true, false}) {
      expect_error(ErrorCode::bad_argument, {"the output ", "input: ", "choose another name"},
                   [&] { check_writable(folder / name, overwrite, inputs); });
      expect_error(ErrorCode::bad_argument, {"the output ", "input: ", "choose another name"},
                   [&] { write_file(folder / name, "output", overwrite, inputs); });
    }
    EXPECT_EQ(get(folder / name), "input");
  }
  write_file(folder / "model/new", "output", true, inputs);
  EXPECT_EQ(get(folder / "model/new"), "output");
  write_file(folder / "other", "output", true, inputs);
  EXPECT_EQ(get(folder / "other"), "output");
  EXPECT_NO_THROW(write_file("/dev/null", "output", false, inputs));
}

TEST(WriteFile, CanBeCheckedBefore) {
  const TemporaryFolder folder;
  put(folder / "x", "old");
  expect_error(ErrorCode::bad_argument, {"x: already exists"}, [&] { check_writable(folder / "x", false); });
  expect_error(ErrorCode::bad_file, {"not an existing folder"}, [&] { check_writable(folder / "gone/x", false); });
  expect_error(ErrorCode::bad_argument, {"is a folder"}, [&] { check_writable(folder.path(), true); });
  check_writable(folder / "x", true);
  check_writable(folder / "y", false);
  check_writable("/dev/null", false);
  EXPECT_EQ(get(folder / "x"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"x"});
}

TEST(WriteFile, DevicesAndPipesAreWrittenTo) {
  const TemporaryFolder folder;
  EXPECT_NO_THROW(write_file("/dev/null", "text", false));
  expect_error(ErrorCode::bad_file, {"/dev/full", "No space left"}, [] { write_file("/dev/full", "text", true); });
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::thread reader([&] { EXPECT_EQ(get(folder / "pipe"), "text"); });
  write_file(folder / "pipe", "text", false);
  reader.join();
}

TEST(WriteFile, OnlyOneOfManyWritersGetsANewName) {
  const TemporaryFolder folder;
  std::atomic<int> winners{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      try {
        write_file(folder / "x", std::to_string(i), false);
        ++winners;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_argument) << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(winners, 1);
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"x"});
}

TEST(WriteFile, IsOldOrNewWheneverItsWriterIsKilled) {
  const TemporaryFolder folder;
  write_file(folder / "x", std::string(20'000, 's'), false);
  kill_at_random_moments(
      [&](int round) { write_file(folder / "x", std::string(20'000, static_cast<char>('a' + round % 26)), true); },
      [&] {
        const std::string text = get(folder / "x");
        EXPECT_EQ(text.size(), 20'000u);
        EXPECT_EQ(text.find_first_not_of(text[0]), std::string::npos);
      });
  write_file(folder / "x", "end", true);
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"x"});
}

TEST(WriteFile, AFileSizeLimitKeepsTheOldFile) {
  const TemporaryFolder folder;
  write_file(folder / "x", "old", false);
  const int status = wait_for(in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10'000, 10'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file(folder / "x", std::string(20'000, 'n'), true);
      return 1;
    } catch (const Error& error) {
      return std::string_view(error.what()).find("File too large") != std::string_view::npos ? 42 : 2;
    }
  }));
  EXPECT_EQ(status, 42);
  EXPECT_EQ(get(folder / "x"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"x"});
}

TEST(WriteFile, LongNamesLeaveRoomForTheMarker) {
  const TemporaryFolder folder;
  const std::string name(255, 'n');  // the longest that common file systems have
  write_file(folder / name, "text", false);
  EXPECT_EQ(get(folder / name), "text");
}

/// Ranks write by name into a folder that the first of them takes away.
TEST(Partial, NothingStaysOfAFolderThatOthersStillWriteInto) {
  const TemporaryFolder folder;
  constexpr int rounds = 100, writers = 3;
  for (int round = 0; round < rounds; ++round) {
    auto partial = std::make_unique<Partial>(folder / "model", Partial::Kind::folder);
    const fs::path place = partial->path();
    std::atomic<bool> ends{false};
    std::atomic<int> written{0};
    std::vector<std::thread> threads;
    for (int writer = 0; writer < writers; ++writer) {
      threads.emplace_back([&, writer] {
        for (int file = 0; !ends; ++file) {
          written +=
              std::ofstream(place / ("part-" + std::to_string(writer) + "-" + std::to_string(file))).is_open() ? 1 : 0;
        }
      });
    }
    while (written < 4 * writers) std::this_thread::yield();
    partial.reset();
    ends = true;
    for (auto& thread : threads) thread.join();
    ASSERT_TRUE(fs::is_empty(folder.path())) << "round " << round;
  }
}

TEST(Partial, KnowsItsOwnNames) {
  EXPECT_TRUE(is_partial_name(".x.w4q-partial-0123456789abcdef"));
  EXPECT_FALSE(is_partial_name("x.w4q-partial-0123456789abcdef"));
  EXPECT_FALSE(is_partial_name(".x.w4q-partial-0123456789abcdeg"));
  EXPECT_FALSE(is_partial_name(".x.w4q-partial-0123"));
  EXPECT_FALSE(is_partial_name(""));
}

}  // namespace
}  // namespace w4q::io
