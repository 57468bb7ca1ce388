// Linears that servers load as one: their names in lists of what stays in 16 bit are asked for, too.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::checkpoint {

struct FusedRow {
  std::string_view name;
  std::span<const std::string_view> parts;
};
/// What is one linear in servers: "qkv_proj" of q_proj, k_proj, v_proj.
std::span<const FusedRow> fused_rows();
/// The row that has a linear of this last name as a part; null: none.
const FusedRow* fused_row(std::string_view part) noexcept;

/// A linear of a mixture's experts by its path: "….experts.3.gate_proj"; of a stack, "….experts.gate_up_proj", without a
/// number. Empty mixture: it is none.
struct ExpertPlace {
  std::string_view mixture, projection;
  int64_t expert = -1;
};
ExpertPlace expert_place(std::string_view path) noexcept;

/// The name under which a server asks for a linear: "….qkv_proj" for "….q_proj", "….experts" for all of a mixture; the
/// path itself where it is loaded as it is.
std::string served_name(std::string_view path);

/// Names of fused layers and mixtures all of whose linears are among `group`, where none is among `others`: what a list
/// that names the group one by one needs beside them.
std::vector<std::string> fused_names(const std::vector<std::string>& group, const std::vector<std::string>& others);

/// Names of a list as programs find them that put a text model and its towers elsewhere than their files do: where one of
/// `packed` stands under "language_model.model.", as in Mistral 3, transformers has "model.language_model.…",
/// "model.vision_tower.…" and "lm_head". Expressions that match either; other models' names as they are.
std::vector<std::string> names_wherever(std::vector<std::string> names, const std::vector<std::string>& packed);

/// Behind the last dot.
std::string_view last_part(std::string_view path) noexcept;
/// Before it; empty where there is none.
std::string_view parent(std::string_view path) noexcept;

}  // namespace w4q::checkpoint
