#include "checkpoint/dialect/gptq_planar.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/text.h"

namespace w4q::checkpoint {
namespace {

constexpr int64_t block = 32;  // codes of three words
constexpr int64_t most_outputs = 128, most_blocks = 64;

using Block = std::array<uint32_t, 3>;

int stream_code(const Block& words, int i) {
  const int first = 3 * i, shift = first % 32;
  uint64_t pair = words[static_cast<size_t>(first / 32)];
  if (shift > 29) pair |= uint64_t{words[static_cast<size_t>(first / 32 + 1)]} << 32;
  return static_cast<int>(pair >> shift & 7);
}

int plane_code(const Block& words, int i) {
  const uint32_t low = words[static_cast<size_t>(i / 16)] >> (2 * (i % 16)) & 3;
  return static_cast<int>(low | (words[2] >> i & 1) << 2);
}

/// Variance of the codes of a block.
template <class Code>
double spread(const Block& words, const Code& code) {
  double sum = 0, squares = 0;
  for (int i = 0; i < block; ++i) {
    const double value = code(words, i);
    sum += value, squares += value * value;
  }
  const double mean = sum / block;
  return squares / block - mean * mean;
}

}  // namespace

std::string planar_evidence(std::span<const std::byte> words, int64_t n, int64_t k) {
  const int64_t blocks = k / block, outputs = std::min(n, most_outputs), taken = std::min(blocks, most_blocks);
  double streams = 0, planes = 0;
  for (int64_t i = 0; i < outputs * taken; ++i) {
    const int64_t row = i % outputs * n / outputs, at = i / outputs * blocks / taken;
    Block three;
    for (size_t w = 0; w < three.size(); ++w) {
      const auto place = static_cast<size_t>((3 * at + static_cast<int64_t>(w)) * n + row);
      std::memcpy(&three[w], words.data() + place * sizeof three[w], sizeof three[w]);
    }
    streams += spread(three, stream_code);
    planes += spread(three, plane_code);
  }
  const auto count = static_cast<double>(outputs * taken);
  streams /= count, planes /= count;
  // Random codes have a variance of 5.25, rounded weights one of 1 to 3.
  constexpr double kept_together = 3.5, clearly_less = 0.75;
  if (outputs * taken < 64 || planes > kept_together || planes > clearly_less * streams) return {};
  return concat("codes vary by ", fixed(planes, 2), " around their means read as planes, by ", fixed(streams, 2),
                " read as streams (random codes: 5.25)");
}

}  // namespace w4q::checkpoint
