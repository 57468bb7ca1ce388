// How GGUF files of the architecture "llama" order the rows of queries and keys: in Hugging Face files the two channels
// that rotate together are half a head apart, in GGUF they are neighbours.
#pragma once

#include <cstdint>

namespace w4q::gguf {

/// Where row `row` of such a tensor stands in the other file, for heads of `head_dim` (even) rows.
constexpr int64_t rotary_row_to_gguf(int64_t row, int64_t head_dim) noexcept {
  const int64_t half = head_dim / 2, channel = row % head_dim;
  return row - channel + 2 * (channel % half) + channel / half;
}
constexpr int64_t rotary_row_from_gguf(int64_t row, int64_t head_dim) noexcept {
  const int64_t half = head_dim / 2, channel = row % head_dim;
  return row - channel + (channel % 2) * half + channel / 2;
}

}  // namespace w4q::gguf
