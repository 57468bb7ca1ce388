#include "checkpoint/fused.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <utility>

#include "core/text.h"

namespace w4q::checkpoint {
namespace {

constexpr std::array<std::string_view, 3> qkv{"q_proj", "k_proj", "v_proj"};
constexpr std::array<std::string_view, 2> gate_up{"gate_proj", "up_proj"};
constexpr std::array<std::string_view, 2> w13{"w1", "w3"};
constexpr std::array<std::string_view, 2> qkvz{"in_proj_qkv", "in_proj_z"};
constexpr std::array<std::string_view, 2> beta_alpha{"in_proj_b", "in_proj_a"};
constexpr std::array<std::string_view, 2> latent{"q_a_proj", "kv_a_proj_with_mqa"};
constexpr std::array<FusedRow, 6> fused_table{{{"qkv_proj", qkv},
                                               {"gate_up_proj", gate_up},
                                               {"w13", w13},
                                               {"in_proj_qkvz", qkvz},
                                               {"in_proj_ba", beta_alpha},
                                               {"fused_qkv_a_proj", latent}}};

int64_t number_of(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

}  // namespace

std::span<const FusedRow> fused_rows() { return fused_table; }

const FusedRow* fused_row(std::string_view part) noexcept {
  const auto found = std::ranges::find_if(
      fused_table, [&](const FusedRow& row) { return std::ranges::find(row.parts, part) != row.parts.end(); });
  return found == fused_table.end() ? nullptr : &*found;
}

ExpertPlace expert_place(std::string_view path) noexcept {
  // A stack: "….experts.gate_up_proj"; one by one: "….experts.3.gate_proj".
  const std::string_view last = last_part(path), above = parent(path);
  if (last_part(above) == "experts") return {above, last, -1};
  const int64_t number = number_of(last_part(above));
  const std::string_view mixture = parent(above);
  if (number < 0 || last_part(mixture) != "experts") return {};
  return {mixture, last, number};
}

std::string served_name(std::string_view path) {
  if (const ExpertPlace place = expert_place(path); !place.mixture.empty()) return std::string(place.mixture);
  const FusedRow* const row = fused_row(last_part(path));
  return row == nullptr ? std::string(path) : concat(parent(path), ".", row->name);
}

std::vector<std::string> fused_names(const std::vector<std::string>& group, const std::vector<std::string>& others) {
  std::set<std::string> taken, found;
  for (const auto& path : others) taken.insert(served_name(path));
  for (const auto& path : group) {
    std::string name = served_name(path);
    if (name != path && !taken.contains(name)) found.insert(std::move(name));
  }
  for (const auto& path : group) found.erase(path);
  return {found.begin(), found.end()};
}

std::vector<std::string> names_wherever(std::vector<std::string> names, const std::vector<std::string>& packed) {
  constexpr std::string_view wrapper = "language_model.", text = "language_model.model.";
  const auto wrapped = [&](const std::string& path) { return path.starts_with(text); };
  if (std::ranges::none_of(packed, wrapped)) return names;
  for (std::string& name : names) {
    const bool inside = wrapped(name);
    std::string expression = inside ? R"(re:(.*\.)?language_model\.(model\.)?)" : R"(re:(.*\.)?)";
    const size_t before = inside ? text.size() : name.starts_with(wrapper) ? wrapper.size() : 0;
    for (const char c : std::string_view(name).substr(before)) {
      if (c == '.') expression += '\\';
      expression += c;
    }
    name = expression + "$";
  }
  return names;
}

std::string_view last_part(std::string_view path) noexcept { return path.substr(path.rfind('.') + 1); }

std::string_view parent(std::string_view path) noexcept {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

}  // namespace w4q::checkpoint
