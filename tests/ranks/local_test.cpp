// Ranks that the program makes of itself, without a launcher: as --devices does, on the CPU (W4Q_LOCAL_RANKS).
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "device/properties.h"
#include "launch.h"

namespace w4q::test {
namespace {

class LocalRanks : public OnBundledModel {
 protected:
  static ProgramResult run_local(int ranks, const std::vector<std::string>& arguments) {
    return run_w4q(arguments, [=] { ::setenv("W4Q_LOCAL_RANKS", std::to_string(ranks).c_str(), 1); });
  }

  void expect_equal(const std::vector<std::string>& options, int ranks) const {
    std::vector<std::string> words{"quantize", two_layer_model(), "--device", "cpu", "--quiet", "--overwrite"};
    words.insert(words.end(), options.begin(), options.end());
    const auto alone = run_w4q([&] {
      auto more = words;
      more.insert(more.end(), {"-o", path("alone")});
      return more;
    }());
    ASSERT_EQ(alone.status, 0) << alone.err;
    words.insert(words.end(), {"-o", path("shared")});
    const auto shared = run_local(ranks, words);
    ASSERT_EQ(shared.status, 0) << shared.err;
    EXPECT_EQ(shared.err, "");
    EXPECT_EQ(folder_digest(path("shared")), folder_digest(path("alone")));
    EXPECT_EQ(names_in(path("")), (std::vector<std::string>{"alone", "shared"}));
  }

  /// Sends `signal` to a rank, 0 the one that was started, once its work has begun, and waits for the end of all.
  ProgramResult run_and_signal(int ranks, size_t victim, int signal) const {
    bool met = false;
    std::atomic<bool> ended{false};
    std::thread meet([&] {
      met = signal_when_begun(path("q"), signal, ended, [&](pid_t first) {
        const auto others = children_of(first);
        if (victim == 0) return others.empty() ? 0 : first;
        return victim <= others.size() ? others[victim - 1] : 0;
      });
    });
    auto result = run_local(ranks, {"quantize", bundled_model(), "-o", path("q"), "--scheme", "exl3-3", "--quiet",
                                    "--device", "cpu", "--threads", "1"});
    ended = true;
    meet.join();
    EXPECT_TRUE(met) << "it ended before it was met";
    return result;
  }
};

TEST_F(LocalRanks, WriteTheBytesOfOneProcess) {
  expect_equal({"--k", "3", "--shard-size", "200kB"}, 3);
  expect_equal({"--recipe", "kbit3: awq → feedback", "--calib", own_text(), "--samples", "3", "--length", "32"}, 2);
}

TEST_F(LocalRanks, MeasureAndWriteTextAsOneProcess) {
  const std::vector<std::string> verify{"verify", bundled_model(), "--ppl", own_text(), "--ctx", "32", "--windows",
                                        "4",      "--device",      "cpu",   "--quiet",  "--json"};
  auto split = verify;
  split.insert(split.end(), {"--split-layers", "2"});
  const auto alone = run_w4q(verify), windows = run_local(2, verify), layers = run_local(2, split);
  for (const auto* run : {&alone, &windows, &layers}) ASSERT_EQ(run->status, 0) << run->err;
  const auto perplexity = [](const ProgramResult& run) { return run.json().at("perplexity").at("perplexity"); };
  EXPECT_EQ(perplexity(windows), perplexity(alone));
  EXPECT_EQ(perplexity(layers), perplexity(alone));
  const std::vector<std::string> generate{"generate", bundled_model(), "--prompt", "Once upon", "--max-tokens",
                                          "12",       "--device",      "cpu",      "--quiet"};
  EXPECT_EQ(run_local(2, generate).out, run_w4q(generate).out);
}

/// Each a part of the layers, in as many as there are ranks or by turns; how far a product is off may differ in its last bits.
TEST_F(LocalRanks, CheckKernelsAsOneProcess) {
  if (std::string why; !device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  ASSERT_EQ(quantize("q", {"--scheme", "kbit3-b32-e4m4"}).status, 0);
  const auto lines = [&](const ProgramResult& run) {
    EXPECT_EQ(run.status, 0) << run.err;
    auto kernels = run.json().at("kernels");
    for (auto& line : kernels) {
      line.erase("to_fp64");
      line.erase("to_cpu");
    }
    return kernels.dump(1);
  };
  const std::vector<std::string> words{"verify", path("q"), "--kernels", "--device", "cuda", "--json", "--quiet"};
  const std::string alone = lines(run_w4q(words));
  for (const int ranks : {2, 5}) EXPECT_EQ(lines(run_local(ranks, words)), alone) << ranks << " ranks";
  EXPECT_EQ(lines(run_w4q({"verify", path("q"), "--kernels", "--devices", "0", "--json", "--quiet"})), alone);
}

TEST_F(LocalRanks, WhatGoesWrongIsToldOnce) {
  const auto missing = run_local(3, {"quantize", path("nothing"), "-o", path("q"), "--quiet"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_EQ(count(missing.err, "error:"), 1u) << missing.err;
  const auto one = run_local(2, {"inspect", bundled_model()});
  EXPECT_EQ(one.status, 3);
  EXPECT_EQ(count(one.err, "error: inspect is the work of one process"), 1u) << one.err;
  EXPECT_THAT(names_in(path("")), ::testing::IsEmpty());
}

/// Whatever ends one of them ends all, and at once: nobody waits until it has been silent for long.
TEST_F(LocalRanks, AKilledOneEndsAllWithOneError) {
  const auto run = run_and_signal(3, 2, SIGKILL);
  EXPECT_EQ(run.status, 5) << run.err;
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("rank 2 of 3 was ended by signal 9"), std::string::npos) << run.err;
  EXPECT_THAT(names_in(path("")), ::testing::IsEmpty());
  EXPECT_LT(run.seconds, 12);  // silence is noticed after 15
}

TEST_F(LocalRanks, ASignalToTheFirstOrToAnotherEndsAllWithOneWord) {
  for (const size_t victim : {size_t{0}, size_t{1}}) {
    const auto run = run_and_signal(3, victim, SIGTERM);
    EXPECT_TRUE(run.signal == SIGTERM || run.status == 128 + SIGTERM) << run.status;
    EXPECT_EQ(count(run.err, "interrupted; nothing was written"), 1u) << run.err;
    EXPECT_EQ(count(run.err, "error:"), 0u) << run.err;
    EXPECT_THAT(names_in(path("")), ::testing::IsEmpty());
  }
}

TEST_F(LocalRanks, TheOptionTakesDifferentGpusOfThisMachine) {
  const auto refused = [&](std::vector<std::string> more, int status, std::string_view text) {
    std::vector<std::string> words{"quantize", bundled_model(), "--k", "3", "-o", path("q"), "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    const auto run = run_w4q(words);
    EXPECT_EQ(run.status, status) << run.err;
    EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
  };
  for (const char* word : {"0,0", "0,", "a", "-1", "0;1"}) refused({"--devices", word}, 2, "numbers of GPUs");
  refused({"--devices", "0,1", "--device", "cpu"}, 2, "--device");
  refused({"--devices", "1000,1001"}, 4, "no GPU to use");  // no machine has so many
  refused({"--devices", "1000"}, 4, "no GPU to use");
  const auto idle = run_w4q({"verify", bundled_model(), "--devices", "0,1", "--quiet"});
  EXPECT_NE(idle.status, 0);
  EXPECT_THAT(names_in(path("")), ::testing::IsEmpty());
}

TEST_F(LocalRanks, TheOptionIsNotForOneOfSeveral) {
  const auto run = run_w4q({"quantize", bundled_model(), "-o", path("q"), "--devices", "0,1"}, [] {
    ::setenv("PMI_SIZE", "2", 1);
    ::setenv("PMI_RANK", "0", 1);
  });
  EXPECT_EQ(run.status, 2) << run.err;
  EXPECT_NE(run.err.find("--devices is for one process, and this is one of 2 (PMI_SIZE)"), std::string::npos)
      << run.err;
}

}  // namespace
}  // namespace w4q::test
