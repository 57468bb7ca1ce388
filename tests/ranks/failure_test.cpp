// A rank that fails, or is gone: one error, the right status, and nothing that looks complete.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <thread>

#include "io/json.h"
#include "launch.h"

namespace w4q::test {
namespace {

class RanksFail : public OnRanks {};

TEST_F(RanksFail, WhatAllFindIsToldOnce) {
  const auto usage = run_ranks(3, {"quantize", "--no-such-option"});
  EXPECT_EQ(usage.status, 2);
  EXPECT_EQ(count(usage.err, "error:"), 1u) << usage.err;

  const auto missing = run_ranks(3, {"quantize", path("nothing"), "-o", path("q"), "--quiet"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_EQ(count(missing.err, "error:"), 1u) << missing.err;
  // Of the lowest that did not hear of another before: on a machine with load 12 that was not the first in 3 of 14 runs.
  EXPECT_TRUE(std::regex_search(missing.err, std::regex("at rank [012] of 3, on "))) << missing.err;
  EXPECT_TRUE(names_in(path("")).empty());
}

TEST_F(RanksFail, WorkOfOneProcessIsRefused) {
  const auto run = run_ranks(2, {"inspect", bundled_model()});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error: inspect is the work of one process, and was started as one of 2"), 1u) << run.err;
  EXPECT_EQ(run.out, "");
}

/// A NaN in one tensor, which one of the ranks meets.
TEST_F(RanksFail, ABadTensorAtOneRankEndsAll) {
  const std::string model = copy_bundled_model(path("model"));
  std::fstream file(model + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  std::string text(header, ' ');
  file.read(text.data(), static_cast<std::streamsize>(header));
  const auto json = io::parse_json(text, "header");
  const auto begin = json.at("model.layers.1.mlp.down_proj.weight").at("data_offsets").at(0).get<uint64_t>();
  file.seekp(static_cast<std::streamoff>(sizeof header + header + begin + 2 * 7));
  file.write("\xff\x7f", 2);
  file.close();
  const auto run = run_ranks(3, {"quantize", model, "-o", path("q"), "--quiet"});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("error: model.layers.1.mlp.down_proj.weight"), std::string::npos) << run.err;
  EXPECT_EQ(names_in(path("")), std::vector<std::string>{"model"});
  EXPECT_LT(run.seconds, 8);  // ranks that hear of it do not wait for their patience, which is 10 s, to end
}

/// Runs of several ranks that something happens to half-way.
class RanksMeet : public OnRanks {
 protected:
  /// So slow that it is met half-way: a search over 2^16 states for each weight.
  static std::vector<std::string> slow(const std::string& output) {
    return {"quantize", bundled_model(), "-o", output, "--scheme", "exl3-3", "--quiet", "--device", "cpu"};
  }

  /// Open MPI's mpirun at times waits for a lock of its own, and never asks how its ranks ended: after 3 s it is killed.
  static void release(pid_t own, const std::atomic<bool>& ended) {
    for (int tenths = 0; !ended; ::usleep(100'000)) {
      const auto launchers = children_of(own);
      tenths = std::ranges::any_of(launchers, waits_for_the_ended) ? tenths + 1 : 0;
      if (tenths < 30) continue;
      for (const pid_t launcher : launchers) ::kill(launcher, SIGKILL);
    }
  }

  static constexpr size_t the_launcher = 1'000;

  /// Sends `signal` to a rank of the run, or to its launcher, once its work has begun, and waits for the end of all.
  ProgramResult run_and_signal(int ranks, size_t victim, int signal, const std::vector<std::string>& more = {}) const {
    const pid_t own = ::getpid();
    bool met = false;
    std::atomic<bool> ended{false};
    std::thread meet([&] {
      met = signal_when_begun(path("q"), signal, ended, [&](pid_t launcher) {
        if (victim == the_launcher) return launcher;
        const auto found = children_of(launcher);
        return found.size() > victim ? found[victim] : 0;
      });
      release(own, ended);
    });
    auto words = slow(path("q"));
    words.insert(words.end(), more.begin(), more.end());
    auto result = run_ranks(ranks, words);
    ended = true;
    meet.join();
    EXPECT_TRUE(met) << "it ended before it was met";
    return result;
  }
};

TEST_F(RanksMeet, ASignalToOneOfThemEndsAllWithOneWord) {
  const auto run = run_and_signal(3, 1, SIGTERM);
  EXPECT_NE(run.status, 0);
  EXPECT_EQ(count(run.err, "interrupted; nothing was written"), 1u) << run.err;
  EXPECT_EQ(count(run.err, "error:"), 0u) << run.err;
  EXPECT_TRUE(names_in(path("")).empty());
  EXPECT_LT(run.seconds, 20);  // what they wait for one another at most, and the launcher
}

/// The launcher ends the others two seconds later, whatever they work on.
TEST_F(RanksMeet, AKilledRankIsNamed) {
  for (const size_t victim : {size_t{0}, size_t{2}}) {
    const auto run = run_and_signal(3, victim, SIGKILL);
    EXPECT_NE(run.status, 0);
    EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
    EXPECT_NE(run.err.find("rank " + std::to_string(victim) + " of 3 has ended without a word"), std::string::npos)
        << run.err;
    EXPECT_EQ(count(run.err, "interrupted"), 0u) << run.err;
    EXPECT_TRUE(names_in(path("")).empty());
  }
}

/// It gives its ranks a second, which what they work on does not keep.
TEST_F(RanksMeet, ASignalToTheLauncherIsToldOnce) {
  for (const bool resume : {false, true}) {
    const auto run = run_and_signal(3, the_launcher, SIGTERM,
                                    resume ? std::vector<std::string>{"--resume"} : std::vector<std::string>());
    EXPECT_NE(run.status, 0);
    EXPECT_EQ(count(run.err, "interrupted; nothing was written"), 1u) << run.err;
    EXPECT_EQ(count(run.err, "what is finished is kept for --resume"), resume ? 1u : 0u) << run.err;
    EXPECT_EQ(count(run.err, "error:"), 0u) << run.err;
    EXPECT_EQ(hidden_of(path("q")).empty(), !resume);
  }
}

/// Neither failed nor ended: that nothing is heard of it is all there is to notice.
TEST_F(RanksMeet, AStoppedRankEndsAllWithOneError) {
  constexpr double timeout = 2;
  ::setenv("W4Q_RANK_TIMEOUT", "2", 1);
  for (const size_t victim : {size_t{2}, size_t{0}}) {
    const auto run = run_and_signal(3, victim, SIGSTOP);
    EXPECT_NE(run.status, 0);
    EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
    EXPECT_NE(run.err.find("rank " + std::to_string(victim) + " of 3"), std::string::npos) << run.err;
    EXPECT_NE(run.err.find("has not been heard of for"), std::string::npos) << run.err;
    EXPECT_FALSE(std::filesystem::exists(path("q")));
    EXPECT_LT(run.seconds, timeout + 10);
    std::filesystem::remove_all(hidden_of(path("q")));
  }
  ::unsetenv("W4Q_RANK_TIMEOUT");
}

/// A file system of its own that is too small for the output, in a namespace where that may be made.
TEST_F(RanksMeet, AFullDiskEndsAllWithOneError) {
  if (run_w4q_behind({"unshare", "-m"}, {"--version"}).status != 0) GTEST_SKIP() << "no namespaces here";
  std::filesystem::create_directory(path("small"));
  std::vector<std::string> launcher{"unshare", "-m", "sh", "-c",
                                    "mount -t tmpfs -o size=1m none " + path("small") +
                                        " && \"$0\" \"$@\"; status=$?; ls -A " + path("small") + "; exit $status"};
  for (auto& word : mpirun(3)) launcher.push_back(word);
  const auto run = run_w4q_behind(
      launcher, {"quantize", bundled_model(), "-o", path("small/q"), "--k", "4", "--quiet", "--threads", "1"});
  EXPECT_EQ(run.status, 3) << run.err;
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("not enough space on the disk"), std::string::npos) << run.err;
  EXPECT_EQ(run.out, "");  // nothing is left there
  EXPECT_LT(run.seconds, 8);
}

/// Checks write nothing that would show how far they are: a rank is met once it has opened the model.
class RanksCheckMeet : public RanksMeet {
 protected:
  static bool has_mapped(pid_t process, const std::string& file) {
    std::ifstream maps("/proc/" + std::to_string(process) + "/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.ends_with(file)) return true;
    }
    return false;
  }

  ProgramResult check_and_signal(const std::vector<std::string>& words, size_t victim, int signal,
                                 const std::string& file) const {
    const pid_t own = ::getpid();
    std::atomic<bool> ended{false}, met{false};
    std::thread meet([&] {
      for (; !met && !ended; ::usleep(1000)) {
        for (const pid_t launcher : children_of(own)) {
          const auto ranks = children_of(launcher);
          if (ranks.size() > victim && has_mapped(ranks[victim], file)) met = ::kill(ranks[victim], signal) == 0;
        }
      }
      release(own, ended);
    });
    auto result = run_ranks(3, words);
    ended = true;
    meet.join();
    EXPECT_TRUE(met) << "it ended before it was met";
    return result;
  }

  std::vector<std::string> of_text(std::vector<std::string> words) const {
    words.insert(words.end(), {"--base", bundled_model(), "--ppl", own_text(), "--ctx", "16", "--device", "cpu",
                               "--json", "--quiet"});
    return words;
  }
};

TEST_F(RanksCheckMeet, AKilledRankOrASignalEndsAllWithOneWord) {
  for (const char* bits : {"2", "3"})
    ASSERT_EQ(quantize(std::string("q") + bits, {"--k", bits, "--device", "cpu"}).status, 0);
  const std::string file = path("q3/model.safetensors");
  const auto killed = check_and_signal(of_text({"compare", path("q2"), path("q3")}), 1, SIGKILL, file);
  EXPECT_NE(killed.status, 0);
  EXPECT_EQ(count(killed.err, "error:"), 1u) << killed.err;
  EXPECT_NE(killed.err.find("rank 1 of 3 has ended without a word"), std::string::npos) << killed.err;
  EXPECT_EQ(killed.out, "");
  const auto interrupted = check_and_signal(of_text({"verify", path("q3")}), 2, SIGTERM, file);
  EXPECT_NE(interrupted.status, 0);
  EXPECT_EQ(count(interrupted.err, "interrupted; nothing was written"), 1u) << interrupted.err;
  EXPECT_EQ(count(interrupted.err, "error:"), 0u) << interrupted.err;
  EXPECT_EQ(interrupted.out, "");
}

/// Two network namespaces with names of their own, where they can be made (two_hosts).
class RanksOnHosts : public RanksMeet {
 protected:
  void SetUp() override {
    RanksMeet::SetUp();
    if (IsSkipped()) return;
    if (std::system("unshare -n -m true 2>/dev/null && ip -V >/dev/null 2>&1") != 0) {
      GTEST_SKIP() << "no network namespaces here (root, ip)";
    }
  }

  static ProgramResult run_on_hosts(int ranks, std::vector<std::string> arguments,
                                    const std::vector<std::string>& environment = {}) {
    std::vector<std::string> launcher{"env"};
    launcher.insert(launcher.end(), environment.begin(), environment.end());
    launcher.insert(launcher.end(), {W4Q_TWO_HOSTS, W4Q_MPIRUN, std::to_string(ranks)});
    arguments.insert(arguments.end(), {"--threads", "1"});
    return run_w4q_behind(launcher, arguments);
  }
};

TEST_F(RanksOnHosts, WriteTheBytesOfOneProcess) {
  const std::vector<std::string> how{"quantize", bundled_model(), "--k", "3", "--quiet", "--device", "cpu"};
  auto alone = how, shared = how;
  alone.insert(alone.end(), {"-o", path("alone")});
  shared.insert(shared.end(), {"-o", path("shared")});
  ASSERT_EQ(run_w4q(alone).status, 0);
  const auto run = run_on_hosts(3, shared);
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(folder_digest(path("shared")), folder_digest(path("alone")));
}

/// The second host sees another disk where the output is to be written.
TEST_F(RanksOnHosts, AFolderThatOneOfThemDoesNotSeeIsNamed) {
  std::filesystem::create_directory(path("place"));
  const auto run = run_on_hosts(2, {"quantize", bundled_model(), "-o", path("place/q"), "--k", "3", "--quiet"},
                                {"OWN_DISK=" + path("place")});
  EXPECT_EQ(run.status, 3) << run.err;
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("at rank 1 of 2, on host-2"), std::string::npos) << run.err;
  EXPECT_TRUE(names_in(path("place")).empty());
}

/// It does, and its part comes over the network.
TEST_F(RanksOnHosts, PutTogetherWhatEachWroteToItsDisk) {
  std::filesystem::create_directory(path("place"));
  const std::vector<std::string> how{"quantize", bundled_model(), "--k", "3", "--quiet", "--device", "cpu"};
  auto alone = how, apart = how;
  alone.insert(alone.end(), {"-o", path("alone")});
  apart.insert(apart.end(), {"-o", path("place/q"), "--local-disks"});
  ASSERT_EQ(run_w4q(alone).status, 0);
  const auto run = run_on_hosts(3, apart, {"OWN_DISK=" + path("place")});
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_NE(run.out.find("put together from 2 disks"), std::string::npos) << run.out;
  EXPECT_EQ(folder_digest(path("place/q")), folder_digest(path("alone")));
}

/// A disk of 1 MB, where the ranks of its host have more to write.
TEST_F(RanksOnHosts, AFullDiskOfOneOfThemEndsAllWithOneError) {
  std::filesystem::create_directory(path("place"));
  const auto run = run_on_hosts(2,
                                {"quantize", bundled_model(), "-o", path("place/q"), "--scheme", "int8-row-f16",
                                 "--quiet", "--device", "cpu", "--local-disks"},
                                {"OWN_DISK=" + path("place")});
  EXPECT_EQ(run.status, 3) << run.err;
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("at rank 1 of 2, on host-2"), std::string::npos) << run.err;
  EXPECT_TRUE(names_in(path("place")).empty());
}

/// The launcher hears nothing any more either, so that what is said is all there is to see. Where W4Q_RANK_KILLS asks for
/// long tests: a stopped rank is the same to the others.
TEST_F(RanksOnHosts, ACutLinkIsNamed) {
  if (std::getenv("W4Q_RANK_KILLS") == nullptr) GTEST_SKIP() << "takes 20 s (set W4Q_RANK_KILLS)";
  const auto run = run_on_hosts(2, slow(path("q")), {"CUT=1.5", "LIMIT=20", "W4Q_RANK_TIMEOUT=2"});
  EXPECT_NE(run.status, 0);
  EXPECT_NE(run.err.find("has not been heard of for"), std::string::npos) << run.err;
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

}  // namespace
}  // namespace w4q::test
