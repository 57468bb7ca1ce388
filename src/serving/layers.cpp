#include "serving/layers.h"

#include <algorithm>
#include <initializer_list>
#include <set>

#include "core/text.h"

namespace w4q::serving {
namespace {

using Names = std::initializer_list<std::string_view>;

bool is_one_of(std::string_view name, Names names) { return std::ranges::find(names, name) != names.end(); }

Split split_of(std::string_view last) {
  if (is_one_of(last, {"o_proj", "down_proj", "out_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "linear_fc2"}))
    return Split::inputs;
  if (is_one_of(last, {"q_proj",    "k_proj",        "v_proj",    "qkv_proj",  "gate_proj",
                       "up_proj",   "gate_up_proj",  "w1",        "w3",        "in_proj_qkv",
                       "in_proj_z", "in_proj_qkvz",  "in_proj_b", "in_proj_a", "in_proj_ba",
                       "q_b_proj",  "kv_b_proj",     "fc1",       "c_fc",      "query_key_value",
                       "W_pack",    "dense_h_to_4h", "linear_fc1"}))
    return Split::outputs;
  return Split::none;
}

}  // namespace

std::vector<Layer> layers_of(const std::map<std::string, StoredLinear, std::less<>>& linears, bool fuses) {
  std::vector<Layer> layers;
  std::map<std::string, size_t, std::less<>> places;
  for (const auto& [path, linear] : linears) {
    const std::string_view last = last_part(path);
    const ExpertPlace expert = expert_place(path);
    const FusedRow* const row = fuses ? fused_row(last) : nullptr;
    Layer layer;
    if (!expert.mixture.empty()) {
      layer.name = expert.mixture, layer.split = Split::experts;
    } else if (row != nullptr) {
      layer.name = concat(parent(path), ".", row->name), layer.fused = row;
      layer.split = row->parts.front() == "q_a_proj" ? Split::none : Split::outputs;
    } else {
      layer.name = path, layer.split = split_of(last);
    }
    const auto [place, added] = places.emplace(layer.name, layers.size());
    if (added) layers.push_back(std::move(layer));
    layers[place->second].parts.push_back(path);
  }
  return layers;
}

bool is_head(std::string_view path) noexcept { return is_one_of(last_part(path), {"lm_head", "output", "embed_out"}); }

bool is_router(std::string_view path) noexcept {
  const std::string_view last = last_part(path);
  return is_one_of(last, {"gate", "router", "shared_expert_gate"}) || last_part(parent(path)) == "router";
}

bool is_served_linear(std::string_view path) noexcept {
  const std::string_view last = last_part(path);
  if (!expert_place(path).mixture.empty()) return true;
  if (path.find("layers.") == std::string_view::npos && path.find("blocks.") == std::string_view::npos &&
      path.find("h.") == std::string_view::npos)
    return false;
  // What sees, hears or predicts further tokens is made by code of its own.
  for (const std::string_view part : {"visual", "vision", "audio", "mtp", "indexer"}) {
    if (path.find(part) != std::string_view::npos) return false;
  }
  if (is_one_of(last, {"in_proj_b", "in_proj_a", "in_proj_ba"})) return true;
  return split_of(last) != Split::none || is_one_of(last, {"q_a_proj", "kv_a_proj_with_mqa"});
}

}  // namespace w4q::serving
