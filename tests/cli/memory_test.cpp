// The resident set while streaming a checkpoint much larger than it.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "program.h"

namespace w4q::test {
namespace {

int64_t free_bytes(const std::filesystem::path& folder) {
  struct statvfs info {};
  return ::statvfs(folder.c_str(), &info) == 0
             ? static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize)
             : 0;
}

/// Layers of 436 MB, an 8B model's shapes: 1.7 GB of them or, with W4Q_MEMORY_LAYERS=n (scripts/test --long: 23, which are
/// 10 GB), so many.
int layers_to_stream() {
  const char* text = std::getenv("W4Q_MEMORY_LAYERS");
  return text == nullptr ? 4 : std::atoi(text);
}

TEST(Memory, QuantizingStaysUnderATenthOfTheModelAndTheLargestTensor) {
  const TemporaryFolder folder;
  const int layers = layers_to_stream();
  if (free_bytes(folder.path()) < layers * int64_t{174'000'000}) GTEST_SKIP() << "needs more free disk for the output";
  const int64_t size = write_sparse_model(folder / "m", layers, 4096, 14336);
  ASSERT_GT(size, layers * int64_t{435'000'000});
  const auto result =
      run_w4q({"quantize", (folder / "m").string(), "-o", (folder / "q").string(), "--k", "3", "--quiet"});
  ASSERT_EQ(result.status, 0) << result.err;
  constexpr int64_t largest = int64_t{14336} * 4096 * 2;
  EXPECT_LT(result.peak_bytes, std::min<int64_t>(size / 10, 1'000'000'000) + largest);
  RecordProperty("peak_megabytes", static_cast<int>(result.peak_bytes / 1'000'000));
  RecordProperty("seconds", static_cast<int>(result.seconds));
}

/// An embedding table of 600 MB, which is a hole in the file, is copied without being in memory.
TEST(Memory, KeptTensorsAreCopiedInPieces) {
  const TemporaryFolder folder;
  constexpr int64_t vocabulary = 300'000, hidden = 1024;
  if (free_bytes(folder.path()) < 1'500'000'000) GTEST_SKIP() << "needs 1.5 GB of free disk for the output";
  write_sparse_model(folder / "m", 1, hidden, 2048, vocabulary);
  const auto quantized = run_w4q(
      {"quantize", (folder / "m").string(), "-o", (folder / "q").string(), "--k", "3", "--device", "cpu", "--quiet"});
  ASSERT_EQ(quantized.status, 0) << quantized.err;
  // 64 MB for the program as plans count it, pieces of 16 MiB read and written, and the largest linear of 4 MB, which is
  // read, widened and packed. Measured 2026-11-23: 30 MB to quantize, 32 MB to repack.
  constexpr int64_t bound = 64'000'000 + 2 * (16 << 20) + 4 * 4'200'000;
  static_assert(bound < vocabulary * hidden * 2 / 5);
  EXPECT_LT(quantized.peak_bytes, bound);
  RecordProperty("quantize_peak_megabytes", static_cast<int>(quantized.peak_bytes / 1'000'000));
  std::filesystem::remove_all(folder / "m");
  const auto repacked = run_w4q({"repack", (folder / "q").string(), "-o", (folder / "r").string(), "--target", "sm89",
                                 "--device", "cpu", "--quiet"});
  ASSERT_EQ(repacked.status, 0) << repacked.err;
  EXPECT_LT(repacked.peak_bytes, bound);
  RecordProperty("repack_peak_megabytes", static_cast<int>(repacked.peak_bytes / 1'000'000));
}

/// Peaks of what is made of an FP8 model of so many layers of 15 MB, the largest matrix of which has 4 MB.
struct SmallFloatPeaks {
  int64_t decoded = 0, quantized = 0, verified = 0;
};

SmallFloatPeaks small_float_peaks(int layers) {
  const TemporaryFolder folder;
  write_sparse_model(folder / "m", layers, 1024, 4096, 1024, true);
  const auto model = (folder / "m").string(), output = (folder / "out").string();
  const auto peak = [](std::vector<std::string> arguments) {
    // What many threads have in hand at a time is more of many layers than of few.
    arguments.insert(arguments.end(), {"--threads", "2"});
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.peak_bytes;
  };
  SmallFloatPeaks peaks;
  peaks.decoded = peak({"repack", model, "-o", output, "--to", "hf16", "--quiet"});
  std::filesystem::remove_all(folder / "out");
  peaks.quantized = peak({"quantize", model, "-o", output, "--k", "4", "--device", "cpu", "--quiet"});
  peaks.verified = peak({"verify", output, "--device", "cpu", "--quiet"});
  return peaks;
}

TEST(Memory, SmallFloatsPassThroughWithoutStaying) {
  const auto few = small_float_peaks(4), many = small_float_peaks(14);
  // Ten layers more are 150 MB of codes, 600 MB decoded to fp32. What may grow are names and figures of tensors, and
  // what threads happen to hold at a time: as much as the largest matrix has in fp32, 16 MB. Measured 2026-11-23: 33 MB
  // to decode, 48 to quantize, 35 to verify.
  constexpr int64_t more = int64_t{4096} * 1024 * 4;
  EXPECT_LT(many.decoded, few.decoded + more);
  EXPECT_LT(many.quantized, few.quantized + more);
  // Of each linear verify keeps some 100 KB of values to look which way they point (statistics_directions.h).
  constexpr int64_t directions = int64_t{10 * 7} * 128 * 1024;
  EXPECT_LT(many.verified, few.verified + more + directions);
  RecordProperty("decode_peak_megabytes", static_cast<int>(many.decoded / 1'000'000));
  RecordProperty("quantize_peak_megabytes", static_cast<int>(many.quantized / 1'000'000));
  RecordProperty("verify_peak_megabytes", static_cast<int>(many.verified / 1'000'000));
}

}  // namespace
}  // namespace w4q::test
