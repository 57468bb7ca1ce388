// Parts of a layer that hold another layer's bytes.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace w4q::verify {

/// "model.layers.3.self_attn.q_proj" → "self_attn".
std::string part_in_layer(const std::string& name);

/// A tensor, and the one before it whose bytes it holds.
struct Repeated {
  std::string name, of;
};

/// The part of one layer whose matrices are another layer's where nothing else of it is; `matrices`: the names of all.
/// Empty: none, for whoever repeats layers repeats them whole, and experts are repeated one by one.
std::string lone_part(std::span<const Repeated> repeated, const std::vector<std::string>& matrices);

}  // namespace w4q::verify
