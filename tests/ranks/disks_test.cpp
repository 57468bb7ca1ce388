// Ranks that share no file system: each disk gets a part of the output, and the first rank's the whole.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>

#include "io/files.h"
#include "launch.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

/// Ranks 1 and 3 are on a host with a disk of its own, rank 2 is on another; all others share what the test sees.
class RanksOnDisks : public OnBundledModel {
 protected:
  RanksOnDisks() : OnBundledModel(two_layer_model()) {}

  void SetUp() override {
    if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
    if (std::system("unshare -m true 2>/dev/null") != 0) GTEST_SKIP() << "no mount namespaces here (root)";
    for (const char* name : {"place", "place.disk-1", "place.disk-2"}) fs::create_directory(path(name));
    fs::create_directory_symlink(path("place.disk-1"), path("place.disk-3"));
  }

  std::vector<std::string> launcher(int ranks) const {
    auto words = mpirun(ranks);
    words.insert(words.end(), {W4Q_OWN_DISKS, path("place")});
    return words;
  }

  ProgramResult run_on_disks(int ranks, std::vector<std::string> arguments) const {
    arguments.insert(arguments.end(), {"--threads", "1"});
    return run_w4q_behind(launcher(ranks), arguments);
  }

  static std::vector<std::string> with(std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  void expect_only(const std::vector<std::string>& names) const {
    EXPECT_EQ(names_in(path("place")), names);
    for (const char* disk : {"place.disk-1", "place.disk-2"}) EXPECT_THAT(names_in(path(disk)), ::testing::IsEmpty());
  }

  /// What one process and four ranks on three disks make of it.
  void expect_equal(const std::vector<std::string>& words) const {
    const auto alone = run_w4q(with(words, {"-o", path("alone")}));
    ASSERT_EQ(alone.status, 0) << alone.err;
    const auto shared = run_on_disks(4, with(words, {"-o", path("place/q"), "--local-disks"}));
    ASSERT_EQ(shared.status, 0) << shared.err;
    EXPECT_EQ(shared.err, "");
    EXPECT_EQ(folder_digest(path("place/q")), folder_digest(path("alone")));
    EXPECT_NE(shared.out.find("put together from 3 disks: "), std::string::npos) << shared.out;
    expect_only({"q"});
    fs::remove_all(path("place/q"));
    fs::remove_all(path("alone"));
  }
};

TEST_F(RanksOnDisks, PartsArePutTogetherToTheBytesOfOneProcess) {
  const std::vector<std::string> quantize{"quantize", model_, "--device", "cpu", "--quiet", "--shard-size", "200kB"};
  expect_equal(with(quantize, {"--k", "3"}));
  expect_equal(with(quantize, {"--scheme", "rotated4-d128+rotated2-d128", "--compress"}));
  expect_equal(
      with(quantize, {"--recipe", "kbit3: awq → feedback", "--calib", own_text(), "--samples", "3", "--length", "32"}));
}

TEST_F(RanksOnDisks, RepackedAndConvertedPartsToo) {
  ASSERT_EQ(OnBundledModel::quantize("q3", {"--scheme", "int4-g128-f16", "--device", "cpu"}).status, 0);
  for (const char* to : {"gptq-v2", "w4q"}) {
    expect_equal({"repack", path("q3"), "--to", to, "--quiet", "--shard-size", "200kB"});
  }
}

/// Nothing goes over the network that nobody asked for.
TEST_F(RanksOnDisks, WithoutTheOptionTheErrorNamesIt) {
  const auto run = run_on_disks(3, {"quantize", model_, "-o", path("place/q"), "--k", "3", "--quiet"});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("not every rank sees the folder"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("at rank 1 of 3"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("--local-disks"), std::string::npos) << run.err;
  expect_only({});
}

TEST_F(RanksOnDisks, AMissingFolderOnOneDiskEndsAllWithOneError) {
  const std::string output = path("place/deep/q");
  fs::create_directory(path("place/deep"));
  const auto run = run_on_disks(3, {"quantize", model_, "-o", output, "--k", "3", "--quiet", "--local-disks"});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("deep: is not an existing folder"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("at rank 1 of 3"), std::string::npos) << run.err;
  expect_only({"deep"});
  EXPECT_THAT(names_in(path("place/deep")), ::testing::IsEmpty());
}

TEST_F(RanksOnDisks, CopiesOfTheModelThatDifferAreNamed) {
  for (const char* disk : {"place", "place.disk-1", "place.disk-2"}) {
    fs::copy(model_, path(std::string(disk) + "/model"), fs::copy_options::recursive);
  }
  const auto config = path("place.disk-2/model/config.json");
  auto text = io::read_file(config);
  text += " ";
  io::write_file(config, text, true);
  const auto run =
      run_on_disks(3, {"quantize", path("place/model"), "-o", path("place/q"), "--k", "3", "--quiet", "--local-disks"});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("the copies of an input differ between ranks"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("found config.json: " + std::to_string(text.size()) + " bytes"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("at rank 2 of 3"), std::string::npos) << run.err;
  for (const char* disk : {"place", "place.disk-1", "place.disk-2"}) {
    EXPECT_EQ(names_in(path(disk)), std::vector<std::string>{"model"});
  }
}

TEST_F(RanksOnDisks, WhatAllRanksReadThatSomeWroteIsRefused) {
  const std::vector<std::string> words{"quantize", model_, "-o", path("place/q"), "--quiet", "--local-disks"};
  for (const auto& more : {std::vector<std::string>{"--to", "gptq-v2", "--scheme", "int4-g128-f16"},
                           {"--quality", "fast", "--target-bpw", "3.5", "--calib", own_text()}}) {
    const auto run = run_on_disks(2, with(words, more));
    EXPECT_EQ(run.status, 2);
    EXPECT_EQ(count(run.err, "error: --local-disks: "), 1u) << run.err;
    expect_only({});
  }
}

/// What each disk has is kept, and sent where the next run puts the whole together.
TEST_F(RanksOnDisks, PartsOfAKilledRunAreTakenUpOnEachDisk) {
  const auto words = [&](const std::string& output) {
    return std::vector<std::string>{"quantize",      bundled_model(), "-o",       output,         "--recipe",
                                    "kbit3: search", "--json",        "--quiet",  "--threads",    "1",
                                    "--device",      "cpu",           "--resume", "--shard-size", "200kB",
                                    "--local-disks"};
  };
  ASSERT_EQ(run_w4q(words(path("whole"))).status, 0);
  const pid_t started = start_w4q_behind(launcher(4), words(path("place/q")));
  int status = 0;
  const auto has_begun = [&](const char* disk, int rank) {
    std::error_code none;
    const auto hidden = hidden_of(path(std::string(disk) + "/q"));
    const auto journal = hidden / ("w4q_journal." + std::to_string(rank) + ".jsonl");
    return !hidden.empty() && fs::file_size(journal, none) > 300 && !none;
  };
  while (!has_begun("place", 0) || !has_begun("place.disk-1", 1) || !has_begun("place.disk-1", 3)) {
    ASSERT_EQ(::waitpid(started, &status, WNOHANG), 0) << "it ended before it was met";
    ::usleep(500);
  }
  for (const pid_t rank : children_of(started)) ::kill(rank, SIGKILL);
  for (int tenths = 0; ::waitpid(started, &status, WNOHANG) == 0; ++tenths) {
    ::usleep(100'000);
    if (tenths == 300) ::kill(started, SIGKILL);
  }
  ASSERT_FALSE(fs::exists(path("place/q"))) << "it ended before it was met";
  ASSERT_FALSE(hidden_of(path("place.disk-1/q")).empty());
  // A run that cannot even begin takes nothing away.
  auto shared = words(path("place/q"));
  shared.pop_back();
  EXPECT_EQ(run_w4q_behind(launcher(3), shared).status, 3);
  EXPECT_FALSE(hidden_of(path("place/q")).empty());
  EXPECT_FALSE(hidden_of(path("place.disk-1/q")).empty());
  const auto resumed = run_w4q_behind(launcher(3), words(path("place/q")));
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  const std::string notes = resumed.json().at("notes").dump();
  EXPECT_NE(notes.find("parts were finished"), std::string::npos) << notes;
  EXPECT_NE(notes.find("put together from 3 disks"), std::string::npos) << notes;
  EXPECT_EQ(folder_digest(path("place/q")), folder_digest(path("whole")));
  expect_only({"q"});
}

/// Without --resume a signal leaves nothing on any disk.
TEST_F(RanksOnDisks, ASignalLeavesNothingOnAnyDisk) {
  const pid_t started =
      start_w4q_behind(launcher(3), {"quantize", bundled_model(), "-o", path("place/q"), "--scheme", "exl3-3",
                                     "--quiet", "--device", "cpu", "--threads", "1", "--local-disks"});
  int status = 0;
  for (const char* disk : {"place", "place.disk-1", "place.disk-2"}) {
    while (hidden_of(path(std::string(disk) + "/q")).empty()) {
      ASSERT_EQ(::waitpid(started, &status, WNOHANG), 0) << "it ended before it was met";
      ::usleep(500);
    }
  }
  ::kill(children_of(started).at(1), SIGTERM);
  for (int tenths = 0; ::waitpid(started, &status, WNOHANG) == 0; ++tenths) {
    ::usleep(100'000);
    if (tenths == 300) ::kill(started, SIGKILL);
  }
  expect_only({});
}

}  // namespace
}  // namespace w4q::test
