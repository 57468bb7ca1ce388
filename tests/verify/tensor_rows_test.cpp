// Rows and values beside those of a role: what was stored in part, twice, or in other bytes is named, and what sound programs
// leave is not.
#include "verify/weights/tensor_rows.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "core/convert.h"
#include "core/rng.h"
#include "made_checkpoint.h"
#include "support.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t layers = 6, n = 96, k = 256;  // of matrices [n, k]

std::string up_proj(int64_t layer) { return concat("model.layers.", layer, ".mlp.up_proj.weight"); }
const std::string table = "model.embed_tokens.weight";

class TensorRows : public ::testing::Test {
 protected:
  void SetUp() override {
    uint64_t drawn = 0;
    const auto put = [&](const std::string& name, int64_t rows) {
      std::vector<float> values(static_cast<size_t>(rows * k));
      for (float& value : values) value = 0.02f * static_cast<float>(random_normal(7, drawn++));
      std::vector<std::byte> bytes(values.size() * 2);
      narrow(values, DType::bf16, bytes);
      made_.tensors[name] = {DType::bf16, {rows, k}, std::move(bytes)};
    };
    for (int64_t layer = 0; layer < layers; ++layer) put(up_proj(layer), n);
    put(table, 2 * n);
  }

  std::span<std::byte> bytes(const std::string& name) { return made_.tensors.at(name).bytes; }
  std::span<std::byte> rows(const std::string& name, int64_t begin, int64_t end) {
    return bytes(name).subspan(static_cast<size_t>(begin * k * 2), static_cast<size_t>((end - begin) * k * 2));
  }
  void each(const std::string& name, const std::function<float(float, size_t)>& how) {
    std::vector<float> values(bytes(name).size() / 2);
    widen(bytes(name), DType::bf16, values);
    for (size_t i = 0; i < values.size(); ++i) values[i] = how(values[i], i);
    narrow(values, DType::bf16, bytes(name));
  }

  std::vector<std::string> faults() {
    made_.write(folder_ / "made");
    return check_rows({folder_ / "made", made_.config, io::Checkpoint::open(folder_ / "made")}).faults;
  }
  void expect(const std::string& name, const std::string& what) {
    EXPECT_THAT(faults(), ElementsAre(::testing::AllOf(::testing::StartsWith(name), HasSubstr(what))));
  }

  test::TemporaryFolder folder_;
  MadeCheckpoint made_{io::Json::object(), {}};
};

TEST_F(TensorRows, SoundOnesAreLeftAlone) {
  EXPECT_THAT(faults(), IsEmpty());
  // Channels that all layers lack, a table that ends in nothing, and one row that stands twice.
  for (int64_t layer = 0; layer < layers; ++layer) std::ranges::fill(rows(up_proj(layer), n - 16, n), std::byte{0});
  std::ranges::fill(rows(table, n, 2 * n), std::byte{0});
  std::ranges::copy(rows(up_proj(2), 3, 4), rows(up_proj(2), 9, 10).begin());
  EXPECT_THAT(faults(), IsEmpty());
}

TEST_F(TensorRows, WrittenInPart) {
  std::ranges::fill(rows(up_proj(3), n - 8, n), std::byte{0});
  expect(up_proj(3), "rows 88 to 95 of 96 are zero, as in no other of its role");
}

TEST_F(TensorRows, ColumnsThatWereNotWritten) {
  each(up_proj(3), [](float value, size_t i) { return i % k < k / 2 ? value : 0; });
  expect(up_proj(3), "the last 256 of 512 bytes of each row are zero");
}

TEST_F(TensorRows, OneRankTwice) {
  std::ranges::copy(rows(up_proj(1), 0, n / 2), rows(up_proj(1), n / 2, n).begin());
  expect(up_proj(1), "48 of 96 rows stand there already, row 48 is row 0 again");
}

TEST_F(TensorRows, OneRankTwiceInAllLayers) {
  for (int64_t layer = 0; layer < layers; ++layer)
    std::ranges::copy(rows(up_proj(layer), 0, n / 2), rows(up_proj(layer), n / 2, n).begin());
  EXPECT_THAT(faults(), ::testing::AllOf(::testing::SizeIs(layers), ::testing::Each(HasSubstr("in all of its role"))));
  // Heads of keys are repeated for as many ranks.
  for (int64_t layer = 0; layer < layers; ++layer) {
    auto moved = made_.tensors.extract(up_proj(layer));
    moved.key() = concat("model.layers.", layer, ".self_attn.k_proj.weight");
    made_.tensors.insert(std::move(moved));
  }
  EXPECT_THAT(faults(), IsEmpty());
}

TEST_F(TensorRows, NothingInAnyLayer) {
  for (int64_t layer = 0; layer < layers; ++layer) std::ranges::fill(bytes(up_proj(layer)), std::byte{0});
  EXPECT_THAT(faults(),
              ::testing::AllOf(::testing::SizeIs(layers), ::testing::Each(HasSubstr("as all of its role are"))));
}

TEST_F(TensorRows, ATableOfNothing) {
  std::ranges::fill(bytes(table), std::byte{0});
  expect(table, "is zero throughout: it was never loaded");
}

TEST_F(TensorRows, FilesOfNothingHaveLostNothing) {
  for (int64_t layer = 0; layer < layers; ++layer) std::ranges::fill(bytes(up_proj(layer)), std::byte{0});
  std::ranges::fill(bytes(table), std::byte{0});
  made_.tensors["model.norm.weight"] = {DType::bf16, {k}, std::vector<std::byte>(static_cast<size_t>(2 * k))};
  EXPECT_THAT(faults(), IsEmpty());
  made_.tensors["model.norm.weight"].bytes.back() = std::byte{0x3F};
  EXPECT_THAT(faults(), ::testing::SizeIs(layers + 1));
}

/// As codes of inputs are that say next to nothing beside their group's.
TEST_F(TensorRows, MayBeAlikeAtAnyDistance) {
  for (int64_t row = 3; row < n; row += 2)
    std::ranges::copy(rows(up_proj(1), 0, 1), rows(up_proj(1), row, row + 1).begin());
  EXPECT_THAT(faults(), IsEmpty());
}

TEST_F(TensorRows, OneRankOfATableTwice) {
  std::ranges::copy(rows(table, 0, n), rows(table, n, 2 * n).begin());
  expect(table, "the second half of its rows is the first half again");
}

TEST_F(TensorRows, PartOfAnotherLayer) {
  std::ranges::copy(rows(up_proj(1), 40, n), rows(up_proj(4), 40, n).begin());
  expect(up_proj(4), concat("rows 40 to 95 of 96 are those of ", up_proj(1)));
  // A layer that was repeated whole is how models are made longer.
  std::ranges::copy(bytes(up_proj(1)), bytes(up_proj(4)).begin());
  EXPECT_THAT(faults(), IsEmpty());
}

TEST_F(TensorRows, RowsThatTrainingDidNotMove) {
  for (int64_t row = 0; row < n; row += 2)
    std::ranges::copy(rows(up_proj(1), row, row + 1), rows(up_proj(4), row, row + 1).begin());
  EXPECT_THAT(faults(), IsEmpty());
}

TEST_F(TensorRows, SignsThatWereDropped) {
  each(up_proj(5), [](float value, size_t) { return std::abs(value); });
  expect(up_proj(5), "no value is negative, others of its role have both signs");
}

TEST_F(TensorRows, CodesWithoutScales) {
  each(up_proj(5), [](float value, size_t) { return std::round(std::clamp(value * 100, -7.0f, 7.0f)); });
  expect(up_proj(5), "different values, others of its role have very many");
}

TEST_F(TensorRows, ValuesThatWereCutOff) {
  each(up_proj(5), [](float value, size_t) { return std::clamp(value, -0.02f, 0.02f); });
  expect(up_proj(5), "are as large as its largest");
}

TEST_F(TensorRows, AStuckBit) {
  const auto stored = bytes(up_proj(2));
  for (size_t i = 9; i < stored.size() / 2; i += 64) stored[2 * i] |= std::byte{8};
  expect(up_proj(2), "bit 3 of every 64th value, from value 9 on, never changes");
}

TEST_F(TensorRows, BytesInTheOtherOrder) {
  const auto stored = bytes(table);
  for (size_t i = 0; i < stored.size(); i += 2) std::swap(stored[i], stored[i + 1]);
  expect(table, "with the bytes of each in the other order");
}

TEST_F(TensorRows, ALostSector) {
  std::ranges::fill(bytes(up_proj(2)).subspan(1100, 512), std::byte{0});
  expect(up_proj(2), "holds zeros from byte 1100 to 1612");
}

TEST_F(TensorRows, MemoryThatNobodyWrote) {
  const auto stored = bytes(up_proj(2)).subspan(4096, 1024);
  for (size_t i = 0; i < stored.size(); i += 8) {
    const uint64_t address = uint64_t{0x7f} << 40 | (i * 0x9E3779B97F4A7C15u >> 34) << 4;
    std::memcpy(stored.data() + i, &address, sizeof(address));
  }
  const auto found = faults();
  ASSERT_FALSE(found.empty());
  EXPECT_THAT(found.front(), HasSubstr("holds addresses of a program from byte 4096 to 5120"));
}

}  // namespace
}  // namespace w4q::verify
