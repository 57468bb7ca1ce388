#include "formats/bit_stream.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "core/rng.h"
#include "support.h"

namespace w4q::formats {
namespace {

std::vector<uint8_t> random_codes(size_t count, int bits) {
  std::vector<uint8_t> codes(count);
  for (size_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(random_bits(17, i) & ((1u << bits) - 1));
  return codes;
}

/// 0, 1, … modulo 2^bits.
std::vector<uint8_t> ramp(size_t count, int bits) {
  std::vector<uint8_t> codes(count);
  for (size_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(i & ((1u << bits) - 1));
  return codes;
}

std::vector<uint32_t> dense(const std::vector<uint8_t>& codes, int bits) {
  std::vector<uint32_t> words(static_cast<size_t>(dense_words(static_cast<int64_t>(codes.size()), bits)), 0xDEADBEEF);
  dense_pack(codes, bits, words);
  return words;
}

std::vector<uint32_t> padded(const std::vector<uint8_t>& codes, int bits) {
  std::vector<uint32_t> words(static_cast<size_t>(padded_words(static_cast<int64_t>(codes.size()), bits)), 0xDEADBEEF);
  padded_pack(codes, bits, words);
  return words;
}

TEST(BitStream, WorkedExamples) {
  EXPECT_EQ(dense(ramp(8, 4), 4), (std::vector<uint32_t>{0x76543210}));
  EXPECT_EQ(dense(ramp(32, 3), 3), (std::vector<uint32_t>{0x88FAC688, 0xC688FAC6, 0xFAC688FA}));
  EXPECT_EQ(dense(ramp(32, 5), 5), (std::vector<uint32_t>{0x8A418820, 0xC5A92839, 0xCA307B9A, 0x38BDAB49, 0xFFBBCDEB}));
  EXPECT_EQ(padded(ramp(32, 3), 3), (std::vector<uint32_t>{0x08FAC688, 0x1A23EB1A, 0x2C688FAC, 0x0000003E}));
}

/// Bit by bit as the header defines them, over every width and every length up to a few words.
TEST(BitStream, EveryWidthAndLength) {
  for (int bits = stream_min_bits; bits <= stream_max_bits; ++bits) {
    for (size_t count = 0; count <= 131; ++count) {
      const std::vector<uint8_t> codes = random_codes(count, bits);
      std::vector<uint32_t> wanted_dense(static_cast<size_t>(dense_words(static_cast<int64_t>(count), bits)));
      std::vector<uint32_t> wanted_padded(static_cast<size_t>(padded_words(static_cast<int64_t>(count), bits)));
      for (size_t i = 0; i < count; ++i) {
        for (size_t bit = 0; bit < static_cast<size_t>(bits); ++bit) {
          const uint32_t value = (codes[i] >> bit) & 1u;
          const size_t at = i * static_cast<size_t>(bits) + bit;
          wanted_dense[at / 32] |= value << (at % 32);
          const size_t per_word = 32 / static_cast<size_t>(bits);
          wanted_padded[i / per_word] |= value << (i % per_word * static_cast<size_t>(bits) + bit);
        }
      }
      ASSERT_EQ(dense(codes, bits), wanted_dense) << bits << " bits, " << count;
      ASSERT_EQ(padded(codes, bits), wanted_padded) << bits << " bits, " << count;
      std::vector<uint8_t> back(count);
      dense_unpack(wanted_dense, bits, back);
      ASSERT_EQ(back, codes) << bits << " bits, " << count;
      std::ranges::fill(back, uint8_t{0});
      padded_unpack(wanted_padded, bits, back);
      ASSERT_EQ(back, codes) << bits << " bits, " << count;
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(dense_get(wanted_dense, static_cast<int64_t>(i), bits), codes[i]) << bits << " bits, " << i;
      }
    }
  }
}

TEST(BitStream, UnusedBitsAreThoseThatNoCodeSets) {
  for (int bits = stream_min_bits; bits <= stream_max_bits; ++bits) {
    for (int64_t count = 1; count <= 67; ++count) {
      const std::vector<uint8_t> ones(static_cast<size_t>(count), static_cast<uint8_t>((1u << bits) - 1));
      EXPECT_EQ(~dense(ones, bits).back(), dense_unused_bits(count, bits)) << bits << " " << count;
      const auto words = padded(ones, bits);
      for (size_t word = 0; word < words.size(); ++word) {
        EXPECT_EQ(~words[word], padded_unused_bits(static_cast<int64_t>(word), count, bits)) << bits << " " << count;
      }
    }
  }
}

TEST(BitStream, SizesAndWidthsThatDoNotFitAreBugs) {
  std::vector<uint8_t> codes(9);
  std::vector<uint32_t> words(1);
  test::expect_error(ErrorCode::internal, {"dense_pack"}, [&] { dense_pack(codes, 4, words); });
  test::expect_error(ErrorCode::internal, {"dense_unpack"}, [&] { dense_unpack(words, 4, codes); });
  test::expect_error(ErrorCode::internal, {"padded_pack"}, [&] { padded_pack(codes, 4, words); });
  std::vector<uint32_t> wide(3);
  test::expect_error(ErrorCode::internal, {"this width"}, [&] { dense_pack(codes, 9, wide); });
}

}  // namespace
}  // namespace w4q::formats
