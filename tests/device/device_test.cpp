// Buffers, checks, timing and ceilings on a real GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/check.h"
#include "device/launch.h"
#include "device/properties.h"
#include "device/timing.h"
#include "support.h"

namespace w4q::device {
namespace {

TEST(DeviceCheck, NamesWhatWasDoneAndWhatFailed) {
  EXPECT_NO_THROW(check(cudaSuccess, "nothing"));
  test::expect_error(ErrorCode::device, {"copying a plane", "cudaErrorInvalidValue"},
                     [] { check(cudaErrorInvalidValue, "copying a plane"); });
  test::expect_error(ErrorCode::device, {"cudaErrorMemoryAllocation", "--device cpu"},
                     [] { check(cudaErrorMemoryAllocation, "allocating"); });
}

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_F(OnGpu, PropertiesMakeSense) {
  const auto gpu = find_gpu();
  EXPECT_GE(gpu->sm, 80);
  EXPECT_FALSE(gpu->name.empty());
  EXPECT_EQ(gpu->multiprocessors, multiprocessors());
  EXPECT_GT(gpu->memory_bytes, int64_t{1} << 30);
  EXPECT_GE(gpu->l2_bytes, int64_t{1} << 20);
  EXPECT_GE(gpu->shared_bytes_per_block, 99 * 1024);
}

TEST_F(OnGpu, BuffersCarryBytesThereAndBack) {
  const Stream stream;
  PinnedBuffer pinned(10'000);
  for (size_t i = 0; i < pinned.bytes().size(); ++i) pinned.bytes()[i] = static_cast<std::byte>(i * 7);
  DeviceBuffer buffer = DeviceBuffer::copy_of(pinned.bytes(), stream);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
  std::vector<std::byte> back(pinned.bytes().size());
  buffer.download(back, stream);
  stream.synchronize();
  EXPECT_TRUE(std::ranges::equal(back, pinned.bytes()));
  buffer.fill(0xA5, stream);
  buffer.download(back, stream);
  stream.synchronize();
  EXPECT_TRUE(std::ranges::all_of(back, [](std::byte value) { return value == std::byte{0xA5}; }));
}

TEST_F(OnGpu, EmptyAndMovedBuffersAreHarmless) {
  const Stream stream;
  DeviceBuffer empty(0);
  empty.fill(1, stream);
  empty.upload({}, stream);
  DeviceBuffer first(64);
  std::byte* const data = first.data();
  DeviceBuffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.size(), 64u);
  DeviceBuffer third;
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
}

TEST_F(OnGpu, CopiesLargerThanTheirBufferAreRefused) {
  const Stream stream;
  DeviceBuffer buffer(16);
  std::vector<std::byte> bytes(17);
  EXPECT_THROW(buffer.upload(bytes, stream), Error);
  EXPECT_THROW(buffer.download(bytes, stream), Error);
}

TEST_F(OnGpu, MemoryThatIsNotThereIsOneClearError) {
  test::expect_error(ErrorCode::device, {"allocating", "--device cpu"},
                     [] { DeviceBuffer(static_cast<size_t>(2 * find_gpu()->memory_bytes)); });
  EXPECT_NO_THROW(DeviceBuffer(1024));  // the failure before left nothing behind
  EXPECT_NO_THROW(check_launch("none", "none"));
}

TEST_F(OnGpu, EventsOrderStreams) {
  const Stream first;
  const Stream second;
  DeviceBuffer from(1 << 20);
  DeviceBuffer to(1 << 20);
  from.fill(3, first);
  const Event filled;
  filled.record(first);
  filled.wait(second);
  check(cudaMemcpyAsync(to.data(), from.data(), to.size(), cudaMemcpyDeviceToDevice, second.get()), "copying");
  std::vector<std::byte> back(to.size());
  to.download(back, second);
  second.synchronize();
  EXPECT_TRUE(std::ranges::all_of(back, [](std::byte value) { return value == std::byte{3}; }));
}

TEST_F(OnGpu, TimingRunsEveryCallAndOrdersItsFigures) {
  DeviceBuffer buffer(64 << 20);
  std::vector<int> calls;
  const Timing timing = time_calls(
      [&](int call, cudaStream_t stream) {
        calls.push_back(call);
        check(cudaMemsetAsync(buffer.data(), call, buffer.size(), stream), "filling");
      },
      {.calls = 5, .replays = 4});
  EXPECT_EQ(calls, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_GT(timing.least, 0);
  EXPECT_LE(timing.least, timing.median);
  EXPECT_LE(timing.median, timing.most);
  EXPECT_EQ(timing.replays, 4);
}

TEST_F(OnGpu, AFailingCallLeavesNoCaptureBehind) {
  const auto fail = [](int, cudaStream_t) { throw Error(ErrorCode::internal, "on purpose"); };
  EXPECT_THROW(time_calls(fail, {.calls = 1, .replays = 1}), Error);
  const Stream stream;
  DeviceBuffer buffer(64);
  buffer.fill(1, stream);
  EXPECT_NO_THROW(stream.synchronize());
}

TEST_F(OnGpu, RotatingCopiesPassTheCache) {
  const int64_t l2 = find_gpu()->l2_bytes;
  EXPECT_GE(rotating_copies(1 << 20) * (int64_t{1} << 20), std::min<int64_t>(4 * l2, int64_t{1024} << 20));
  EXPECT_EQ(rotating_copies(16 * l2), 1);
}

TEST_F(OnGpu, CeilingsAreThoseOfAMemory) {
  const Ceilings ceilings = measure_ceilings(int64_t{1} << 28);
  for (double rate : {ceilings.read, ceilings.write, ceilings.copy}) {
    EXPECT_GT(rate, 50e9);  // slower than any GPU this runs on
    EXPECT_LT(rate, 20e12);
  }
}

}  // namespace
}  // namespace w4q::device
