// Weights of many shapes of distribution, and the helpers that the tests of formats, quantize, repack and laws share.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/rng.h"
#include "core/views.h"
#include "formats/scheme_registry.h"

namespace w4q::test {

struct Distribution {
  std::string_view name;
  float (*draw)(uint64_t seed, uint64_t index);
};

inline float draw_normal(uint64_t seed, uint64_t index) { return static_cast<float>(random_normal(seed, index)); }

/// What a block may meet: the usual, the skewed and the ends of fp32.
inline constexpr Distribution distributions[] = {
    {"normal", draw_normal},
    {"small normal", [](uint64_t s, uint64_t i) { return 0.02f * draw_normal(s, i); }},
    {"uniform", [](uint64_t s, uint64_t i) { return static_cast<float>(2 * random_uniform(s, i) - 1); }},
    {"heavy tail",
     [](uint64_t s, uint64_t i) { return draw_normal(s, i) / static_cast<float>(random_uniform(s + 1, i) + 1e-3); }},
    {"one-hot", [](uint64_t s, uint64_t i) { return i % 32 == random_bits(s, i / 32) % 32 ? -0.7f : 0.0f; }},
    {"constant", [](uint64_t, uint64_t) { return 0.37f; }},
    {"zero", [](uint64_t, uint64_t) { return 0.0f; }},
    {"negative", [](uint64_t s, uint64_t i) { return -static_cast<float>(random_uniform(s, i)); }},
    {"denormal",
     [](uint64_t s, uint64_t i) { return std::bit_cast<float>(uint32_t(random_bits(s, i)) & 0x807FFFFFu); }},
    {"mixed magnitude",
     [](uint64_t s, uint64_t i) {
       return draw_normal(s, i) * std::exp2(static_cast<float>(random_bits(s + 1, i / 32) % 60) - 30.0f);
     }},
    {"1e30", [](uint64_t s, uint64_t i) { return 1e30f * draw_normal(s, i); }},
    {"1e-30", [](uint64_t s, uint64_t i) { return 1e-30f * draw_normal(s, i); }},
    {"largest", [](uint64_t s, uint64_t i) { return random_bits(s, i) % 2 ? 0x1.fffffep127f : -0x1.fffffep127f; }},
};

/// n × k draws, of which laws ask for the same again and again: those made before are kept.
inline std::vector<float> sample(const Distribution& distribution, int64_t n, int64_t k, uint64_t seed = 1) {
  thread_local std::map<std::pair<std::string_view, uint64_t>, std::vector<float>> drawn;
  std::vector<float>& values = drawn[{distribution.name, seed}];
  for (size_t i = values.size(); i < static_cast<size_t>(n * k); ++i) values.push_back(distribution.draw(seed, i));
  return {values.begin(), values.begin() + n * k};
}

inline std::vector<float> decode(const formats::PackedWeight& canonical) {
  std::vector<float> values(static_cast<size_t>(canonical.n * canonical.k));
  const auto& row = formats::scheme_row(canonical.scheme.family);
  for (int64_t r = 0; r < canonical.n; ++r) {
    row.decode_row(canonical, r,
                   std::span(values).subspan(static_cast<size_t>(r * canonical.k), static_cast<size_t>(canonical.k)));
  }
  return values;
}

/// Signal to quantization noise, in dB.
inline double sqnr(std::span<const float> values, std::span<const float> decoded) {
  double signal = 0;
  double noise = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double difference = static_cast<double>(values[i]) - static_cast<double>(decoded[i]);
    signal += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    noise += difference * difference;
  }
  return 10 * std::log10(signal / noise);
}

/// The largest magnitude of the block of 32 that holds column `column` of a row of k values.
inline float block_absmax_at(std::span<const float> row, size_t column) {
  const size_t first = column / 32 * 32;
  float largest = 0;
  for (size_t i = first; i < std::min(first + 32, row.size()); ++i) largest = std::max(largest, std::abs(row[i]));
  return largest;
}

/// FNV-1a, 64 bit: a fingerprint of planes for frozen golden files.
inline uint64_t fingerprint(std::span<const std::byte> bytes, uint64_t hash = 0xCBF29CE484222325u) {
  // By pointers: tests are hardly optimised, and take it of gigabytes.
  const auto* at = reinterpret_cast<const unsigned char*>(bytes.data());
  for (const auto* const end = at + bytes.size(); at != end; ++at) hash = (hash ^ *at) * 0x100000001B3u;
  return hash;
}

}  // namespace w4q::test
