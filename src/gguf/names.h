// How GGUF files name the tensors of Llama, Mistral, Qwen2 and Qwen3 models, and how they order the rows of some.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace w4q::gguf {

/// "blk.3.attn_q.weight" → "model.layers.3.self_attn.q_proj.weight"; nothing for a name that no such model has.
std::optional<std::string> name_from_gguf(std::string_view gguf_name);
/// The inverse.
std::optional<std::string> name_to_gguf(std::string_view name);

/// True for the weights and biases whose rows the architecture "llama" reorders: q_proj and k_proj, by their names in
/// Hugging Face files. There the two channels that rotate together are half a head apart; in GGUF they are neighbours.
bool has_rotary_rows(std::string_view name) noexcept;

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
