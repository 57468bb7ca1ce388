// The resident set while streaming a checkpoint much larger than it.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "program.h"

namespace w4q::test {
namespace {

int64_t free_bytes(const std::filesystem::path& folder) {
  struct statvfs info {};
  return ::statvfs(folder.c_str(), &info) == 0
             ? static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize)
             : 0;
}

TEST(Memory, QuantizingTenGigabytesStaysUnderOneGigabyteAndTheLargestTensor) {
  const TemporaryFolder folder;
  constexpr int64_t needed = 4'000'000'000;
  if (free_bytes(folder.path()) < needed) GTEST_SKIP() << "needs 4 GB of free disk for the output";
  // 23 layers of 436 MB each: an 8B model's shapes.
  const int64_t size = write_sparse_model(folder / "m", 23, 4096, 14336);
  ASSERT_GT(size, 10'000'000'000);
  const auto result =
      run_w4q({"quantize", (folder / "m").string(), "-o", (folder / "q").string(), "--k", "3", "--quiet"});
  ASSERT_EQ(result.status, 0) << result.err;
  constexpr int64_t largest = int64_t{14336} * 4096 * 2;
  EXPECT_LT(result.peak_bytes, 1'000'000'000 + largest);
  RecordProperty("peak_megabytes", static_cast<int>(result.peak_bytes / 1'000'000));
  RecordProperty("seconds", static_cast<int>(result.seconds));
}

}  // namespace
}  // namespace w4q::test
