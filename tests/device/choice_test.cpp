#include "device/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support.h"

namespace w4q::device {
namespace {

TEST(DeviceChoice, CpuIsAlwaysThere) { EXPECT_EQ(open_device("cpu"), nullptr); }

TEST(DeviceChoice, AutoTakesAGpuIfThereIsOne) {
  std::string why;
  const auto gpu = find_gpu(&why);
  EXPECT_EQ(open_device("auto") != nullptr, gpu.has_value());
  EXPECT_EQ(gpu.has_value(), why.empty()) << why;
}

TEST(DeviceChoice, InsistingOnAMissingGpuIsAnErrorWithTheReason) {
  for (const int ordinal : {0, 1, 1000}) {
    const std::string word = "cuda:" + std::to_string(ordinal);
    std::string why;
    if (find_gpu(&why, ordinal)) {
      EXPECT_EQ(open_device(word)->ordinal(), ordinal);
      if (ordinal == 0) {
        EXPECT_EQ(open_device("cuda")->ordinal(), 0);
      }
      continue;
    }
    test::expect_error(ErrorCode::device, {"no GPU to use", why, "--device cpu"}, [&] { open_device(word); });
    test::expect_error(ErrorCode::device, {"no GPU to measure", why}, [&] { open_gpu(word); });
  }
}

TEST(DeviceChoice, OtherWordsAreRefused) {
  for (const char* word :
       {"tpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda:1x", "cuda1", "cuda:99999999999"}) {
    test::expect_error(ErrorCode::bad_argument, {"unknown", "auto, cpu, cuda, cuda:N"}, [&] { open_device(word); });
    EXPECT_NE(refused_device(word), "") << word;
  }
  for (const char* word : {"auto", "cpu", "cuda", "cuda:0", "cuda:17"}) EXPECT_EQ(refused_device(word), "") << word;
}

/// Each process of a machine has a GPU of its own as far as there are enough; all GPUs are taken, evenly.
TEST(DeviceChoice, ProcessesOfOneMachineTakeTheGpusInTurn) {
  EXPECT_EQ(gpu_of({}, 8), 0);
  EXPECT_EQ(sharers_of({}, 8), 1);
  for (const int gpus : {1, 2, 3, 8}) {
    for (const int count : {1, 2, 5, 8, 17}) {
      std::vector<int> processes(static_cast<size_t>(gpus));
      for (int index = 0; index < count; ++index) ++processes[static_cast<size_t>(gpu_of({index, count}, gpus))];
      for (int index = 0; index < count; ++index) {
        EXPECT_EQ(sharers_of({index, count}, gpus), processes[static_cast<size_t>(gpu_of({index, count}, gpus))]);
      }
      EXPECT_LE(std::ranges::max(processes) - std::ranges::min(processes), 1);
    }
  }
  EXPECT_EQ(gpu_of({3, 4}, 0), 0);  // no GPU: opening the first one says why
  EXPECT_EQ(sharers_of({3, 4}, 0), 1);
}

}  // namespace
}  // namespace w4q::device
