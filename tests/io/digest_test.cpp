#include "io/digest.h"

#include "core/parallel.h"
#include "core/rng.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "support.h"

namespace w4q::io {
namespace {

using test::expect_error;

std::vector<std::byte> random_bytes(size_t size, uint64_t seed = 7) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(random_bits(seed, i));
  return bytes;
}

TEST(Digest, IsThatOfTheReference) {
  // xxhsum -H2 of nothing, and of "abc".
  EXPECT_EQ(digest_of(std::string_view()).text(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest_of(std::string_view("abc")).text(), "06b05ab6733a618578af5f94892f3950");
}

TEST(Digest, TextComesBack) {
  const Digest digest = digest_of(std::string_view("abc"));
  EXPECT_EQ(parse_digest(digest.text()), digest);
  for (const char* bad : {"", "06b05ab6733a618578af5f94892f395", "06b05ab6733a618578af5f94892f395g",
                          "06B05AB6733A618578AF5F94892F3950", "06b05ab6733a618578af5f94892f39500"}) {
    EXPECT_EQ(parse_digest(bad), std::nullopt) << bad;
  }
  for (const Shape& shape : {Shape{}, Shape{0}, Shape{4096}, Shape{3, 1, 9}}) {
    const TensorDigest tensor{"BF16", shape, digest};
    EXPECT_EQ(parse_tensor_digest(tensor.text()), tensor) << tensor.text();
  }
  for (const char* head : {"", "BF16", "BF16 ", "BF16 [", "BF16 [1", "BF16 1]", "BF16 [-1]", "BF16 [1,2]", "BF16 [1, ]",
                           "BF16 [01]", " [1]", "BF16 [99999999999999999999]", "BF16  [1]", "BF16 [1] "}) {
    EXPECT_EQ(parse_tensor_digest(std::string(head) + " " + digest.text()), std::nullopt) << head;
  }
}

TEST(Digest, IsOverTypeShapeAndEveryByte) {
  auto bytes = random_bytes(3 * digest_piece + 17);
  const auto size = static_cast<int64_t>(bytes.size());
  const TensorDigest whole = hash_tensor("U8", {size}, bytes);
  EXPECT_NE(hash_tensor("I8", {size}, bytes).digest, whole.digest);
  EXPECT_NE(hash_tensor("U8", {1, size}, bytes).digest, whole.digest);
  for (const size_t place : {size_t{0}, digest_piece - 1, digest_piece, 2 * digest_piece + 5, bytes.size() - 1}) {
    bytes[place] ^= std::byte{1};
    EXPECT_NE(hash_tensor("U8", {size}, bytes).digest, whole.digest) << place;
    bytes[place] ^= std::byte{1};
  }
  EXPECT_EQ(hash_tensor("U8", {size}, bytes), whole);
}

/// Neither threads nor the way in which the bytes come change it.
TEST(Digest, OfPartsIsThatOfTheWhole) {
  for (const size_t size : {size_t{0}, size_t{1}, digest_piece - 1, digest_piece, digest_piece + 1, 2 * digest_piece,
                            5 * digest_piece + 3}) {
    const auto bytes = random_bytes(size);
    const Shape shape{static_cast<int64_t>(size)};
    const TensorDigest whole = hash_tensor("U8", shape, bytes);
    TensorHasher hasher;
    for (const size_t step : {size_t{1000}, digest_piece - 1, digest_piece, 3 * digest_piece + 1}) {
      for (size_t begin = 0; begin < size; begin += step) {
        hasher.add(std::span(bytes).subspan(begin, std::min(step, size - begin)));
      }
      EXPECT_EQ(hasher.added(), size);
      EXPECT_EQ(hasher.finish("U8", shape), whole) << size << " by " << step;
    }
    set_threads(1);
    EXPECT_EQ(hash_tensor("U8", shape, bytes), whole);
    set_threads(0);
  }
}

class WrittenDigests : public ::testing::Test {
 protected:
  static constexpr int64_t size = 3'000'000;

  /// Of tensors written whole, in parts, and in parts out of order.
  TensorDigests write(const WriteOptions& options) {
    std::filesystem::create_directories(folder_ / "m");
    CheckpointWriter writer(folder_ / "m",
                            {{"whole", DType::u8, {size}},
                             {"parts", DType::u8, {size}},
                             {"backward", DType::u8, {size}},
                             {"none", DType::f32, {0, 4}},
                             {"aside", DType::u8, {size}, true}},
                            options);
    writer.write("whole", random_bytes(size, 1));
    writer.write("aside", random_bytes(size, 4));
    const auto forward = random_bytes(size, 2), backward = random_bytes(size, 3);
    for (int64_t i = 0; i < 3; ++i) {
      writer.write_part("parts", i * 1'000'000,
                        std::span(forward).subspan(static_cast<size_t>(i) * 1'000'000, 1'000'000));
      writer.write_part("backward", (2 - i) * 1'000'000,
                        std::span(backward).subspan(static_cast<size_t>(2 - i) * 1'000'000, 1'000'000));
    }
    writer.finish();
    return writer.digests();
  }

  test::TemporaryFolder folder_;
};

TEST_F(WrittenDigests, AreThoseThatAreRead) {
  WriteOptions shards, compressed;
  shards.max_shard_bytes = 4'000'000;
  compressed.compress = true;
  std::optional<TensorDigests> first;
  for (const WriteOptions& options : {WriteOptions{}, shards, compressed}) {
    const TensorDigests written = write(options);
    EXPECT_EQ(written.size(), 5u);
    EXPECT_EQ(written.at("backward"), hash_tensor("U8", {size}, random_bytes(size, 3)));
    EXPECT_EQ(Checkpoint::open(folder_ / "m").digests(), written);
    EXPECT_EQ(first.value_or(written), written);
    first = written;
    std::filesystem::remove_all(folder_ / "m");
  }
}

TEST_F(WrittenDigests, AreHeldAgainstWhatIsExpected) {
  TensorDigests expected = write({});
  const auto checkpoint = Checkpoint::open(folder_ / "m");
  checkpoint.take_digests(expected);
  EXPECT_NO_THROW(checkpoint.load("whole"));
  EXPECT_EQ(checkpoint.digests(), expected);
  std::swap(expected.at("parts"), expected.at("whole"));
  const auto again = Checkpoint::open(folder_ / "m");
  again.take_digests(expected);
  expect_error(ErrorCode::bad_file,
               {"\"parts\" is not what was written", "expected U8 [3000000]", "got      U8 [3000000]", "w4q hash"},
               [&] { again.load("parts"); });
}

}  // namespace
}  // namespace w4q::io
