// Pages that were lost: what is found, and what may be meant.
#include "verify/zero_pages.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "made_checkpoint.h"
#include "support.h"

namespace w4q::verify {
namespace {

constexpr size_t row_bytes = 3000, rows = 40;

/// Rows of bytes that are not zero, but for these stretches.
std::string said_of(const std::vector<ByteRun>& zeros) {
  std::vector<std::byte> bytes(row_bytes * rows);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(1 + i % 7);
  for (const ByteRun& run : zeros) {
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(run.begin),
              bytes.begin() + static_cast<std::ptrdiff_t>(run.end), std::byte{0});
  }
  return lost_page(byte_runs(bytes), bytes.size(), row_bytes);
}

TEST(ZeroPages, AreFoundWhereverTheyBegin) {
  for (size_t begin = 100; begin < 3 * page_bytes; begin += 61) {
    std::vector<std::byte> bytes(6 * page_bytes);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(1 + i % 3);
    std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(begin), page_bytes, std::byte{0});
    const auto runs = byte_runs(bytes);
    ASSERT_EQ(runs.size(), 1u) << begin;
    EXPECT_EQ(runs[0].begin, begin);
    EXPECT_EQ(runs[0].end, begin + page_bytes);
    bytes[begin + 500] = std::byte{1};
    EXPECT_TRUE(byte_runs(bytes).empty()) << begin;
  }
}

TEST(ZeroPages, ErasedBlocksHoldOtherBytes) {
  std::vector<std::byte> bytes(row_bytes * rows);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 7);
  std::fill_n(bytes.begin() + 20'000, page_bytes, std::byte{0xFF});
  EXPECT_NE(lost_page(byte_runs(bytes), bytes.size(), row_bytes).find("nothing but bytes of 255 from byte 20000"),
            std::string::npos);
}

TEST(ZeroPages, WithinRowsAreLost) {
  EXPECT_EQ(said_of({{500, 500 + page_bytes}}),
            "holds zeros from byte 500 to 4596, which are no whole rows of 3000: pages were lost");
  EXPECT_NE(said_of({{500, 4596}, {30000 + 700, 30000 + 4796}}).find("and 1 further stretches"), std::string::npos);
  // Cut off: the rest is zeros to the end.
  EXPECT_NE(said_of({{50'000, row_bytes * rows}}).find("from byte 50000 to 120000"), std::string::npos);
}

TEST(ZeroPages, WholeRowsAndColumnsMayBeMeant) {
  EXPECT_EQ(said_of({}), "");
  EXPECT_EQ(said_of({{6000, 12'000}}), "");              // tokens without embeddings
  EXPECT_EQ(said_of({{90'000, row_bytes * rows}}), "");  // padding
  EXPECT_EQ(said_of({{0, row_bytes * rows}}), "");       // nothing at all
  EXPECT_EQ(said_of({{6000, 12'010}}), "");              // and a few zeros of the next row
  std::vector<ByteRun> columns;
  for (size_t row = 0; row < 4; ++row) columns.push_back({row * 9000 + 1000, row * 9000 + 6000});
  EXPECT_EQ(said_of(columns), "");
}

/// A router without a row for one expert, beside one that has all.
TEST(ZeroPages, RowsOfARouter) {
  const test::TemporaryFolder folder;
  auto made = test::made_mixture(test::Storage::bf16);
  const auto routers = made.names_with("mlp.gate.weight");
  ASSERT_EQ(routers.size(), 2u);
  const auto clear = [&](const std::string& name) {
    std::ranges::fill(made.values<uint16_t>(name).subspan(128, 128), uint16_t{0});
    made.write(folder / "made");
    return check_zero_pages({folder / "made", made.config, io::Checkpoint::open(folder / "made")}).faults;
  };
  const auto faults = clear(routers[0]);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_TRUE(faults[0].starts_with(routers[0] + ": is zero in 1 rows")) << faults[0];
  EXPECT_TRUE(clear(routers[1]).empty());  // all have such rows
}

}  // namespace
}  // namespace w4q::verify
