// Runs that were ended are taken up, and end with the bytes of one that was not.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>

#include "core/rng.h"
#include "io/files.h"
#include "io/output.h"
#include "io/zstd_frames.h"
#include "launch.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

class Resumed : public OnBundledModel {
 protected:
  /// Slow enough to be met half-way.
  std::vector<std::string> slow(const std::string& name, const std::string& bits = "3") const {
    return {"quantize",     bundled_model(), "-o",      path(name), "--recipe",  "kbit" + bits + ": search",
            "--shard-size", "200kB",         "--json",  "--quiet",  "--threads", "1",
            "--device",     "cpu",           "--resume"};
  }

  std::vector<std::string> calibrated(const std::string& name) const {
    return {"quantize", bundled_model(), "-o",        path(name), "--recipe", "kbit3: feedback",
            "--calib",  own_text(),      "--samples", "6",        "--length", "64",
            "--json",   "--quiet",       "--threads", "1",        "--device", "cpu",
            "--resume"};
  }

  fs::path hidden(const std::string& name) const { return hidden_of(path(name)); }

  /// Ends a run once it has finished a part of its work.
  void end_half_way(const std::string& name, int signal) const { end_half_way(name, signal, slow(name)); }
  void end_half_way(const std::string& name, int signal, const std::vector<std::string>& words) const {
    const pid_t child = start_w4q(words);
    int status = 0;
    std::error_code none;
    while (fs::file_size(hidden(name) / "w4q_journal.0.jsonl", none) < 2000 || none) {
      ASSERT_EQ(::waitpid(child, &status, WNOHANG), 0) << "it ended before it was met";
      ::usleep(500);
    }
    ::kill(child, signal);
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended before it was met";
    ASSERT_FALSE(fs::exists(path(name)));
    ASSERT_FALSE(hidden(name).empty());
  }

  static std::vector<std::string> with(std::vector<std::string> words, std::initializer_list<std::string> more) {
    words.insert(words.end(), more);
    return words;
  }

  /// Weight files of the hidden folder, by name.
  std::vector<fs::path> weight_files(const std::string& name) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(hidden(name))) {
      if (entry.path().extension() == ".safetensors") found.push_back(entry.path());
    }
    std::ranges::sort(found);
    return found;
  }

  static std::string notes(const ProgramResult& run) { return run.json().at("notes").dump(); }
};

TEST_F(Resumed, WhatAKilledRunFinishedIsKeptAndTheBytesAreThose) {
  ASSERT_EQ(run_w4q(slow("whole")).status, 0);
  for (const int signal : {SIGKILL, SIGTERM}) {
    end_half_way("q", signal);
    const auto resumed = run_w4q(slow("q"));
    ASSERT_EQ(resumed.status, 0) << resumed.err;
    EXPECT_NE(notes(resumed).find("parts were finished"), std::string::npos) << notes(resumed);
    EXPECT_EQ(notes(resumed).find("resumed: 0 of"), std::string::npos) << notes(resumed);
    EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
    EXPECT_TRUE(hidden("q").empty());
    fs::remove_all(path("q"));
  }
}

TEST_F(Resumed, TheReportIsThatOfAnUndisturbedRun) {
  const auto whole = run_w4q(slow("whole"));
  end_half_way("q", SIGKILL);
  const auto resumed = run_w4q(slow("q"));
  auto a = whole.json(), b = resumed.json();
  for (auto* json : {&a, &b}) {
    for (const char* key : {"seconds", "notes", "expected_seconds"}) json->erase(key);
    for (auto& tensor : json->at("tensors")) tensor.erase("seconds");
  }
  EXPECT_EQ(a.dump(1), b.dump(1));
}

TEST_F(Resumed, DamagedPartsAreMadeAnew) {
  ASSERT_EQ(run_w4q(slow("whole")).status, 0);
  end_half_way("q", SIGKILL);
  for (const auto& entry : fs::directory_iterator(hidden("q"))) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(entry.file_size() - 100));
    file.write("damaged", 7);
  }
  ASSERT_EQ(run_w4q(slow("q")).status, 0);
  EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
}

/// As after a loss of power: files that are gone, empty, or begin with zeros.
TEST_F(Resumed, LostFilesAreMadeAnew) {
  ASSERT_EQ(run_w4q(slow("whole")).status, 0);
  end_half_way("q", SIGKILL);
  const auto files = weight_files("q");
  ASSERT_GE(files.size(), 4u);
  fs::remove(files[0]);
  fs::resize_file(files[1], 0);
  fs::resize_file(files[2], 1000);
  std::fstream(files[3], std::ios::in | std::ios::out | std::ios::binary) << std::string(64, '\0');
  const auto run = run_w4q(slow("q"));
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_NE(notes(run).find("parts were finished"), std::string::npos) << notes(run);
  EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
}

/// Killed while files are compressed, one after the other, each of which goes once its compressed copy is there.
TEST_F(Resumed, FilesThatAreCompressedAlreadyAreTakenUp) {
  ASSERT_EQ(run_w4q(with(slow("whole"), {"--compress"})).status, 0);
  end_half_way("q", SIGKILL, with(slow("q"), {"--compress"}));
  const auto files = weight_files("q");
  for (const size_t done : {0, 1}) {
    io::compress_file(files[done], files[done].native() + ".zst", 3);
    fs::remove(files[done]);
  }
  io::compress_file(files[2], files[2].native() + ".zst", 3);
  fs::resize_file(files[2].native() + ".zst", 30);
  const auto run = run_w4q(with(slow("q"), {"--compress"}));
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_NE(notes(run).find("parts were finished"), std::string::npos) << notes(run);
  EXPECT_EQ(notes(run).find("resumed: 0 of"), std::string::npos) << notes(run);
  EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
}

/// Last bits of what is calibrated depend on what multiplies: parts of two kinds would be no output of either.
TEST_F(Resumed, WhatWasCalibratedOtherwiseIsNotTakenUp) {
  const std::vector<std::string> words = calibrated("q");
  end_half_way("q", SIGKILL, words);
  const auto journal = hidden("q") / "w4q_journal.json";
  auto text = io::read_json(journal);
  EXPECT_FALSE(text.at("products").get<std::string>().empty());
  text["products"] = "cuBLAS, another device";
  io::write_file(journal, text.dump(), true);
  const auto run = run_w4q(words);
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_NE(
      notes(run).find("begun from the start: what a run left was calibrated with cuBLAS, another device, and this "
                      "one multiplies with "),
      std::string::npos)
      << notes(run);
}

TEST_F(Resumed, APipeIsRefused) {
  for (const std::string text : {"/dev/stdin", "/dev/null"}) {
    const auto run = run_w4q_behind({"sh", "-c", "cat /dev/null | \"$0\" \"$@\""},
                                    {"quantize", bundled_model(), "-o", path("q"), "--recipe", "kbit3: awq", "--calib",
                                     text, "--device", "cpu", "--quiet", "--resume"});
    EXPECT_EQ(run.status, 2);
    EXPECT_EQ(run.err.find("error: --resume: " + text + " is no regular file"), 0u) << run.err;
    EXPECT_NE(run.err.find("into a file first"), std::string::npos) << run.err;
  }
}

TEST_F(Resumed, AnotherCommandAndAChangedInputBeginFromTheStart) {
  end_half_way("q", SIGKILL);
  const auto other = run_w4q(slow("q", "2"));
  ASSERT_EQ(other.status, 0) << other.err;
  EXPECT_NE(notes(other).find("begun from the start: what a run left was another command's"), std::string::npos)
      << notes(other);
  ASSERT_EQ(run_w4q(slow("whole", "2")).status, 0);
  EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
  const auto nothing = run_w4q(slow("new"));
  EXPECT_NE(notes(nothing).find("there was nothing to resume"), std::string::npos) << notes(nothing);
}

TEST_F(Resumed, WithoutTheOptionNothingIsLeftOrTaken) {
  end_half_way("q", SIGKILL);
  auto words = slow("q");
  words.pop_back();
  const auto run = run_w4q(words);
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(notes(run).find("resumed"), std::string::npos);
  EXPECT_TRUE(hidden("q").empty());
}

/// One of three ranks is killed once a part is finished, in a run that is calibrated and in one that is compressed; two go
/// on.
TEST_F(Resumed, AKilledRankOfACalibratedOrCompressedRunIsTakenUp) {
  if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  const auto calibrated_words = [&](const std::string& name) { return calibrated(name); };
  const auto compressed_words = [&](const std::string& name) { return with(slow(name), {"--compress"}); };
  for (const std::function<std::vector<std::string>(const std::string&)>& words :
       {std::function(calibrated_words), std::function(compressed_words)}) {
    const auto undisturbed = run_w4q(words("whole"));
    ASSERT_EQ(undisturbed.status, 0) << undisturbed.err;
    const pid_t launcher = start_w4q_behind(mpirun(3), words("q"));
    int status = 0;
    std::error_code none;
    while (hidden("q").empty() || fs::file_size(hidden("q") / "w4q_journal.0.jsonl", none) < 500 || none) {
      ASSERT_EQ(::waitpid(launcher, &status, WNOHANG), 0) << "it ended before it was met";
      ::usleep(500);
    }
    const auto ranks = children_of(launcher);
    ASSERT_EQ(ranks.size(), 3u);
    ::kill(ranks[1], SIGKILL);
    // mpirun has been seen to wait for ranks that had ended.
    for (int tenths = 0; ::waitpid(launcher, &status, WNOHANG) == 0; ++tenths) {
      ::usleep(100'000);
      if (tenths == 300) ::kill(launcher, SIGKILL);
    }
    ASSERT_FALSE(fs::exists(path("q"))) << "it ended before it was met";
    const auto resumed = run_w4q_behind(mpirun(2), words("q"));
    ASSERT_EQ(resumed.status, 0) << resumed.err;
    EXPECT_NE(notes(resumed).find("parts were finished"), std::string::npos) << notes(resumed);
    EXPECT_EQ(notes(resumed).find("resumed: 0 of"), std::string::npos) << notes(resumed);
    EXPECT_EQ(folder_digest(path("q")), folder_digest(path("whole")));
    fs::remove_all(path("q"));
    fs::remove_all(path("whole"));
  }
}

/// Ranks killed at random moments, or all of them with their launcher; the next run of another number of ranks goes on.
/// W4Q_RANK_KILLS: how many times.
TEST_F(Resumed, KilledRanksNeverLeaveAWrongFolder) {
  if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  const char* wanted = std::getenv("W4Q_RANK_KILLS");
  const int kills = wanted == nullptr ? 4 : std::atoi(wanted);
  const auto undisturbed = run_w4q_behind(mpirun(3), slow("whole"));
  ASSERT_EQ(undisturbed.status, 0) << undisturbed.err;
  const std::string whole = folder_digest(path("whole"));
  int met = 0;
  for (int i = 0; i < kills; ++i) {
    const auto number = static_cast<uint64_t>(i);
    const pid_t launcher = start_w4q_behind(mpirun(2 + i % 3), slow("q"));
    ::usleep(static_cast<useconds_t>(1e6 * undisturbed.seconds * (0.3 + 0.5 * random_uniform(31, number))));
    const auto ranks = children_of(launcher);
    const auto victim = static_cast<size_t>(random_uniform(32, number) * static_cast<double>(ranks.size() + 1));
    ::kill(victim < ranks.size() ? ranks[victim] : launcher, victim < ranks.size() ? SIGKILL : SIGTERM);
    int status = 0;
    // mpirun has been seen to wait for ranks that had ended: a minute is more than any run here takes.
    for (int tenths = 0; ::waitpid(launcher, &status, WNOHANG) == 0; ++tenths) {
      ::usleep(100'000);
      if (tenths == 600) ::kill(launcher, SIGKILL);
    }
    met += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
    if (!fs::exists(path("q"))) continue;
    ASSERT_EQ(folder_digest(path("q")), whole) << "after kill " << i;
    fs::remove_all(path("q"));
  }
  // How many runs a kill still finds running depends on the machine.
  EXPECT_GE(met, 1) << "no run was killed: the test proved nothing";
  const auto last = run_w4q_behind(mpirun(3), slow("q"));
  ASSERT_EQ(last.status, 0) << last.err;
  EXPECT_EQ(folder_digest(path("q")), whole);
}

}  // namespace
}  // namespace w4q::test
