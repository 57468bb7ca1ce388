#include "core/views.h"

#include <cstdint>
#include <cstring>

#include "support.h"

namespace w4q {
namespace {

TEST(Buffer, IsAlignedZeroedAndCopiedOnlyOnDemand) {
  Buffer buffer(1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Buffer::alignment, 0u);
  for (const auto byte : buffer.bytes()) ASSERT_EQ(byte, std::byte{0});
  buffer.as<uint32_t>()[3] = 7;
  const Buffer copy = buffer.clone();
  Buffer moved = std::move(buffer);
  EXPECT_EQ(moved.as<uint32_t>()[3], 7u);
  EXPECT_EQ(copy.as<uint32_t>()[3], 7u);
  EXPECT_EQ(buffer.size(), 0u);  // NOLINT(bugprone-use-after-move): the moved-from state is promised to be empty
  EXPECT_NE(copy.data(), moved.data());
}

/// Memory that is used again is as zero as fresh memory, and copies hold what they copy.
TEST(Buffer, ViewsKeepWhatTheyLookAt) {
  auto owner =
      std::make_shared<const Buffer>(Buffer::copy_of(std::as_bytes(std::span("some bytes of a file that is mapped"))));
  const auto bytes = owner->bytes();
  {
    const Buffer view = Buffer::view_of(bytes.subspan(8, 16), owner);
    EXPECT_EQ(view.data(), bytes.data() + 8);
    EXPECT_EQ(view.size(), 16u);
    const Buffer moved = Buffer::view_of(bytes, std::exchange(owner, nullptr));
    const Buffer copy = view.clone();
    EXPECT_NE(copy.data(), view.data());
    EXPECT_TRUE(same_bytes(copy.bytes(), view.bytes()));
    EXPECT_TRUE(same_bytes(moved.bytes().subspan(8, 16), view.bytes()));
    const Buffer unaligned = Buffer::view_of(moved.bytes().subspan(3, 5), nullptr);
    EXPECT_NE(unaligned.data(), moved.data() + 3) << "a copy: planes are read as arrays";
    EXPECT_TRUE(same_bytes(unaligned.bytes(), moved.bytes().subspan(3, 5)));
  }
}

TEST(Buffer, ReusedMemoryIsZeroed) {
  constexpr size_t size = size_t{2} << 20;
  const BufferReuse reuse(3 * size);
  const std::byte* place = nullptr;
  {
    Buffer first(size);
    std::memset(first.data(), 0xA5, size);
    place = first.data();
  }
  Buffer second(size);
  EXPECT_EQ(second.data(), place);
  for (const std::byte byte : second.bytes()) ASSERT_EQ(byte, std::byte{0});
  std::memset(second.data(), 0x5A, size);
  const Buffer copy = second.clone();
  EXPECT_TRUE(same_bytes(copy.bytes(), second.bytes()));
}

TEST(Buffer, ReuseKeepsLargeOnesRatherThanSmallOnes) {
  constexpr size_t size = size_t{2} << 20;
  const BufferReuse reuse(3 * size);
  const std::byte* large = nullptr;
  {
    const Buffer first(size), second(size);
    Buffer third(2 * size);
    large = third.data();
    std::memset(third.data(), 0xA5, third.size());
  }
  const Buffer again = Buffer::unfilled(2 * size);
  ASSERT_EQ(again.data(), large);
  for (const std::byte byte : again.bytes()) ASSERT_EQ(byte, std::byte{0xA5}) << "filled for nothing";
}

TEST(Buffer, EmptyIsFine) {
  const Buffer empty(0);
  EXPECT_EQ(empty.size(), 0u);
  EXPECT_EQ(empty.clone().size(), 0u);
}

TEST(Shape, CountsElementsAndBytes) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({3, 0, 5}), 0);
  EXPECT_EQ(byte_count(DType::bf16, {3, 5}), 30);
  EXPECT_EQ(byte_count(DType::f4, {3, 4}), 6);
}

TEST(MatrixView, RowsFollowTheStride) {
  int values[12] = {};
  const MatrixView<int> view(values, 3, 2, 4);
  EXPECT_EQ(view.row(2) - view.row(0), 8);
  const MatrixView<const int> constant = view;
  EXPECT_EQ(constant.row(1), values + 4);
}

}  // namespace
}  // namespace w4q
