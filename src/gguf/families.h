// What architectures have in GGUF beyond a plain Llama: keys of their own, and what readers take for granted.
#pragma once

#include <span>
#include <string_view>

#include "gguf/keys.h"
#include "io/gguf.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::gguf {

struct GgufFamily {
  std::string_view model_type;  ///< of the architecture's row
  bool mixture = false;         ///< told from other rows of the same name by its experts
  bool sees = false;            ///< … by its rope.dimension_sections
  bool own_windows = false;     ///< `write` sees to them
  bool own_biases = false;      ///< `read` does, from the tensors
  bool partial_rotary = false;  ///< rope.dimension_count may be less than a head
  bool own_sizes = false;       ///< `read` takes sizes that differ between layers
  bool own_rope = false;        ///< `write` and `read` see to its scaling
  bool joins_experts = false;   ///< gates and ups of experts are one tensor where they are one in folders
  bool tiles_heads = false;     ///< value heads of delta nets: first ones of all key heads, then second ones
  bool halves_pairs = false;    ///< channels that turn together, neighbours in folders, are half of what turns apart
  /// Keys that mean something else, or nothing, elsewhere.
  std::span<const std::string_view> keys = {};
  /// Appends keys of its own. Throws unsupported for what readers would compute otherwise. `metadata` keys begin with
  /// `prefix`: "qwen3moe.".
  void (*write)(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) = nullptr;
  /// Fills config.json with what they say.
  void (*read)(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) = nullptr;
};

/// Null for a row that needs none.
const GgufFamily* gguf_family(std::string_view model_type) noexcept;

}  // namespace w4q::gguf
