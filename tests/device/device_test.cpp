// Buffers, checks, timing and ceilings on a real GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/check.h"
#include "device/copy.h"
#include "device/properties.h"
#include "device/timing.h"
#include "gpu.h"
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
  EXPECT_GE(gpu->multiprocessors, 1);
  EXPECT_GT(gpu->memory_bytes, int64_t{1} << 30);
  EXPECT_GE(gpu->l2_bytes, int64_t{1} << 20);
  EXPECT_GE(gpu->shared_bytes_per_block_optin, 99 * 1024);
  EXPECT_GT(gpu->shared_bytes_per_multiprocessor, gpu->shared_bytes_per_block_optin);
}

TEST_F(OnGpu, AGpuThatIsNotThereIsRefused) {
  test::expect_error(ErrorCode::device, {"no GPU to use", "there is no cuda:1000", "--device cpu"},
                     [] { Context(1000); });
}

TEST_F(OnGpu, SparesOfAStreamGoRound) {
  Stream stream(test::gpu());
  stream.keep_spares();
  const std::byte* first = nullptr;
  {
    const DeviceBuffer buffer(stream, 1000);
    first = buffer.data();
  }
  EXPECT_EQ(stream.spares()->bytes(), 1000);
  DeviceBuffer again(stream, 1000);
  const DeviceBuffer other(stream, 1000);
  EXPECT_EQ(again.data(), first);
  EXPECT_NE(other.data(), first);
  EXPECT_EQ(stream.spares()->bytes(), 0);
  again = DeviceBuffer();
  EXPECT_EQ(stream.spares()->bytes(), 1000);
  stream.spares()->free_all();
  EXPECT_EQ(stream.spares()->bytes(), 0);
  DeviceBuffer late;
  {
    Stream gone(test::gpu());
    gone.keep_spares();
    late = DeviceBuffer(gone, 16);
  }
  EXPECT_NE(late.data(), nullptr);
}

TEST_F(OnGpu, EventsThatNothingRecordedAreNotWaitedFor) {
  const Stream stream(test::gpu());
  const Event never;
  EXPECT_NO_THROW(never.synchronize());
  EXPECT_NO_THROW(never.wait(stream));
}

/// Two GPUs in one process: what belongs to one is made, used and freed there, whichever was current.
class OnTwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!find_gpu(&why, 1)) GTEST_SKIP() << "needs two GPUs: " << why;
  }
};

TEST_F(OnTwoGpus, BytesTravelByTurns) {
  Context first(0), second(1);
  const Stream a(first), b(second);
  std::vector<std::byte> ones(1 << 20, std::byte{1}), twos(ones.size(), std::byte{2}), back(ones.size());
  DeviceBuffer on_first(first, ones.size()), on_second(second, ones.size());
  EXPECT_EQ(on_first.gpu(), 0);
  EXPECT_EQ(on_second.gpu(), 1);
  for (int round = 0; round < 3; ++round) {
    on_first.upload(ones, a);
    on_second.upload(twos, b);
    on_first.download(back, a);
    a.synchronize();
    EXPECT_EQ(back, ones);
    on_second.download(back, b);
    b.synchronize();
    EXPECT_EQ(back, twos);
  }
}

TEST_F(OnTwoGpus, MemoryIsFreedWhereItIs) {
  Context second(1);
  constexpr size_t bytes = size_t{256} << 20;
  { DeviceBuffer warm_up(second, bytes); }
  const int64_t before = second.free_bytes();
  auto buffer = std::make_optional<DeviceBuffer>(second, bytes);
  EXPECT_LE(second.free_bytes(), before - static_cast<int64_t>(bytes));
  const Scope elsewhere(0);
  std::thread([&] { buffer.reset(); }).join();  // a thread with no GPU of its own yet
  EXPECT_GE(second.free_bytes(), before);
}

TEST_F(OnTwoGpus, AScopeGivesBackWhatWasCurrent) {
  const auto current = [] {
    int ordinal = -1;
    check(cudaGetDevice(&ordinal), "asking");
    return ordinal;
  };
  make_current(0);
  {
    const Scope other(1);
    EXPECT_EQ(current(), 1);
    { const Scope same(1); }
    EXPECT_EQ(current(), 1);
  }
  EXPECT_EQ(current(), 0);
}

TEST_F(OnTwoGpus, AnEventStaysOnItsGpu) {
  Context first(0), second(1);
  const Stream a(first), b(second);
  Event event;
  event.record(a);
  event.wait(b);  // streams of another GPU may wait for it
  EXPECT_THROW(event.record(b), Error);
  b.synchronize();
}

TEST_F(OnGpu, BuffersCarryBytesThereAndBack) {
  const Stream stream(test::gpu());
  PinnedBuffer pinned(test::gpu(), 10'000);
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
  const Stream stream(test::gpu());
  DeviceBuffer empty(test::gpu(), 0);
  empty.fill(1, stream);
  empty.upload({}, stream);
  DeviceBuffer first(test::gpu(), 64);
  std::byte* const data = first.data();
  DeviceBuffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.size(), 64u);
  DeviceBuffer third;
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
}

TEST_F(OnGpu, CopiesLargerThanTheirBufferAreRefused) {
  const Stream stream(test::gpu());
  DeviceBuffer buffer(test::gpu(), 16);
  std::vector<std::byte> bytes(17);
  EXPECT_THROW(buffer.upload(bytes, stream), Error);
  EXPECT_THROW(buffer.download(bytes, stream), Error);
}

TEST_F(OnGpu, MemoryThatIsNotThereIsOneClearError) {
  test::expect_error(ErrorCode::device, {"allocating", "--device cpu"},
                     [] { DeviceBuffer(test::gpu(), static_cast<size_t>(2 * find_gpu()->memory_bytes)); });
  EXPECT_NO_THROW(DeviceBuffer(test::gpu(), 1024));  // the failure before left nothing behind
  EXPECT_NO_THROW(check_launch("none", "none"));
}

TEST_F(OnGpu, EventsOrderStreams) {
  const Stream first(test::gpu());
  const Stream second(test::gpu());
  DeviceBuffer from(test::gpu(), 1 << 20);
  DeviceBuffer to(test::gpu(), 1 << 20);
  from.fill(3, first);
  Event filled;
  filled.record(first);
  filled.wait(second);
  copy(Way::on_gpu, to.data(), from.data(), to.size(), second, "copying");
  std::vector<std::byte> back(to.size());
  to.download(back, second);
  second.synchronize();
  EXPECT_TRUE(std::ranges::all_of(back, [](std::byte value) { return value == std::byte{3}; }));
}

TEST_F(OnGpu, TimingRunsEveryCallAndOrdersItsFigures) {
  DeviceBuffer buffer(test::gpu(), 64 << 20);
  std::vector<int> calls;
  const Timing timing = time_calls(test::gpu(),
                                   [&](int call, const Stream& stream) {
                                     calls.push_back(call);
                                     buffer.fill(call, stream);
                                   },
                                   {.calls = 5, .replays = 4});
  EXPECT_EQ(calls, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_GT(timing.least, 0);
  EXPECT_LE(timing.least, timing.median);
  EXPECT_LE(timing.median, timing.most);
  EXPECT_EQ(timing.replays, 4);
}

TEST_F(OnGpu, AFailingCallLeavesNoCaptureBehind) {
  const auto fail = [](int, const Stream&) { throw Error(ErrorCode::internal, "on purpose"); };
  EXPECT_THROW(time_calls(test::gpu(), fail, {.calls = 1, .replays = 1}), Error);
  const Stream stream(test::gpu());
  DeviceBuffer buffer(test::gpu(), 64);
  buffer.fill(1, stream);
  EXPECT_NO_THROW(stream.synchronize());
}

TEST_F(OnGpu, RotatingCopiesPassTheCache) {
  const int64_t l2 = find_gpu()->l2_bytes;
  EXPECT_GE(rotating_copies(test::gpu().properties(), 1 << 20) * (int64_t{1} << 20),
            std::min<int64_t>(4 * l2, int64_t{1024} << 20));
  EXPECT_EQ(rotating_copies(test::gpu().properties(), 16 * l2), 1);
}

TEST_F(OnGpu, CeilingsAreThoseOfAMemory) {
  const Ceilings ceilings = measure_ceilings(test::gpu(), int64_t{1} << 28);
  for (double rate : {ceilings.read, ceilings.write, ceilings.copy}) {
    EXPECT_GT(rate, 50e9);  // slower than any GPU this runs on
    EXPECT_LT(rate, 20e12);
  }
}

}  // namespace
}  // namespace w4q::device
