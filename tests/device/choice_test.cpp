#include "device/choice.h"

#include <gtest/gtest.h>

#include "device/properties.h"
#include "support.h"

namespace w4q::device {
namespace {

TEST(DeviceChoice, CpuIsAlwaysThere) { EXPECT_EQ(choose_device("cpu"), Device::cpu); }

TEST(DeviceChoice, AutoTakesAGpuIfThereIsOne) {
  std::string why;
  const auto gpu = find_gpu(&why);
  EXPECT_EQ(choose_device("auto"), gpu ? Device::cuda : Device::cpu);
  EXPECT_EQ(gpu.has_value(), why.empty()) << why;
}

TEST(DeviceChoice, InsistingOnAMissingGpuIsAnErrorWithTheReason) {
  std::string why;
  if (find_gpu(&why)) {
    EXPECT_EQ(choose_device("cuda"), Device::cuda);
  } else {
    test::expect_error(ErrorCode::device, {"no GPU to use", why, "--device cpu"}, [] { choose_device("cuda"); });
  }
}

TEST(DeviceChoice, OtherWordsAreRefused) {
  test::expect_error(ErrorCode::bad_argument, {"tpu", "auto, cpu, cuda"}, [] { choose_device("tpu"); });
  test::expect_error(ErrorCode::bad_argument, {"unknown"}, [] { choose_device(""); });
}

}  // namespace
}  // namespace w4q::device
