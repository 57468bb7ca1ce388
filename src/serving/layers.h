// The layers that a server makes of linears: q, k and v as one, gate and up as one, all experts of a mixture as one.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/fused.h"
#include "serving/stored_linear.h"

namespace w4q::serving {

using checkpoint::expert_place;
using checkpoint::ExpertPlace;
using checkpoint::fused_row;
using checkpoint::FusedRow;
using checkpoint::last_part;
using checkpoint::parent;

/// How a layer is spread over GPUs.
enum class Split {
  none,     ///< each has the whole
  outputs,  ///< column parallel: each has some rows of the matrices
  inputs,   ///< row parallel: each has some columns
  experts,  ///< gate and up by outputs, down by inputs
};

struct Layer {
  std::string name;  ///< as a server asks its config for it: "….self_attn.qkv_proj", "….mlp.experts"
  const FusedRow* fused = nullptr;
  Split split = Split::none;
  std::vector<std::string> parts;  ///< paths of linears that are there
};

/// Layers of all linears, in the order of names. Unless `fuses` each linear is a layer, but experts are together.
std::vector<Layer> layers_of(const std::map<std::string, StoredLinear, std::less<>>& linears, bool fuses);

/// Whether decoders make a linear that may be quantized of a matrix of this path: attention and MLPs, no routers,
/// embeddings and norms.
bool is_served_linear(std::string_view path) noexcept;
bool is_head(std::string_view path) noexcept;
bool is_router(std::string_view path) noexcept;

}  // namespace w4q::serving
