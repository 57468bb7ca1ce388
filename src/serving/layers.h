// The layers that a server makes of linears: q, k and v as one, gate and up as one, all experts of a mixture as one.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "serving/stored_linear.h"

namespace w4q::serving {

/// How a layer is spread over GPUs.
enum class Split {
  none,     ///< each has the whole
  outputs,  ///< column parallel: each has some rows of the matrices
  inputs,   ///< row parallel: each has some columns
  experts,  ///< gate and up by outputs, down by inputs
};

struct FusedRow {
  std::string_view name;
  std::span<const std::string_view> parts;
};
/// What is one linear in servers: "qkv_proj" of q_proj, k_proj, v_proj.
std::span<const FusedRow> fused_rows();
/// The row that has a linear of this last name as a part; null: none.
const FusedRow* fused_row(std::string_view part) noexcept;

struct Layer {
  std::string name;  ///< as a server asks its config for it: "….self_attn.qkv_proj", "….mlp.experts"
  const FusedRow* fused = nullptr;
  Split split = Split::none;
  std::vector<std::string> parts;  ///< paths of linears that are there
};

/// A linear of a mixture's experts by its path: "….experts.3.gate_proj". Empty mixture: it is none.
struct ExpertPlace {
  std::string_view mixture, projection;
  int64_t expert = -1;
};
ExpertPlace expert_place(std::string_view path) noexcept;

/// Layers of all linears, in the order of names. Unless `fuses` each linear is a layer, but experts are together.
std::vector<Layer> layers_of(const std::map<std::string, StoredLinear, std::less<>>& linears, bool fuses);

/// Whether decoders make a linear that may be quantized of a matrix of this path: attention and MLPs, no routers,
/// embeddings and norms.
bool is_served_linear(std::string_view path) noexcept;
bool is_head(std::string_view path) noexcept;
bool is_router(std::string_view path) noexcept;

}  // namespace w4q::serving
