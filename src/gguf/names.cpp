#include "gguf/names.h"

#include <array>

#include "core/text.h"

namespace w4q::gguf {
namespace {

struct Pair {
  std::string_view gguf, hugging_face;
};

constexpr std::array<Pair, 3> outside_layers{{
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
}};

constexpr std::array<Pair, 11> in_layers{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
}};

constexpr std::string_view gguf_layer = "blk.", hugging_face_layer = "model.layers.";

/// "3.attn_q" → "3." and "attn_q"; nothing where no plain number stands in front.
std::optional<std::pair<std::string_view, std::string_view>> cut_number(std::string_view text) {
  const size_t digits = text.find_first_not_of("0123456789");
  if (digits == 0 || digits == std::string_view::npos || digits > 6 || text[digits] != '.') return std::nullopt;
  if (digits > 1 && text[0] == '0') return std::nullopt;
  return std::pair(text.substr(0, digits + 1), text.substr(digits + 1));
}

std::optional<std::string> translate(std::string_view name, std::string_view Pair::*from, std::string_view Pair::*to,
                                     std::string_view layer_from, std::string_view layer_to) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view module = name.substr(0, dot), suffix = name.substr(dot);
  if (suffix != ".weight" && suffix != ".bias") return std::nullopt;
  for (const auto& pair : outside_layers) {
    if (pair.*from == module) return concat(pair.*to, suffix);
  }
  if (!module.starts_with(layer_from)) return std::nullopt;
  const auto parts = cut_number(module.substr(layer_from.size()));
  if (!parts) return std::nullopt;
  for (const auto& pair : in_layers) {
    if (pair.*from == parts->second) return concat(layer_to, parts->first, pair.*to, suffix);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> name_from_gguf(std::string_view gguf_name) {
  return translate(gguf_name, &Pair::gguf, &Pair::hugging_face, gguf_layer, hugging_face_layer);
}

std::optional<std::string> name_to_gguf(std::string_view name) {
  return translate(name, &Pair::hugging_face, &Pair::gguf, hugging_face_layer, gguf_layer);
}

bool has_rotary_rows(std::string_view name) noexcept {
  return name.find(".self_attn.q_proj.") != std::string_view::npos ||
         name.find(".self_attn.k_proj.") != std::string_view::npos;
}

}  // namespace w4q::gguf
