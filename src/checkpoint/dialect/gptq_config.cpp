#include "checkpoint/dialect/gptq_config.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

constexpr std::string_view head = "lm_head";

/// The keys of `source` over what `common` says.
GptqSetting read_setting(const DialectSource& source, GptqSetting common) {
  common.bits = static_cast<int>(config_integer(source, {"bits", "w_bit"}, common.bits, 2, 8));
  if (source.config.contains("group_size") || source.config.contains("q_group_size")) {
    common.group = config_group(source, {"group_size", "q_group_size"});
  }
  common.symmetric = config_flag(source, {"sym"}, common.symmetric);
  return common;
}

/// A path as an expression that matches it and nothing else.
std::string exactly(std::string_view path) {
  std::string text = "^";
  for (const char c : path) {
    if (std::string_view(".^$*+?()[]{}|\\").find(c) != std::string_view::npos) text += '\\';
    text += c;
  }
  return text + "$";
}

GptqSetting setting_of(const DialectLinear& linear) {
  return {linear.scheme.bits, linear.scheme.block, linear.symmetric, false};
}

struct Described {
  GptqSetting setting;
  bool act_order = false;

  bool operator==(const Described&) const = default;
};

Described described(const DialectLinear& linear) { return {setting_of(linear), linear.scheme.act_order}; }

/// What most linears have.
Described most_common(const std::vector<DialectLinear>& linears) {
  std::vector<std::pair<Described, size_t>> counts;
  for (const auto& linear : linears) {
    const Described wanted = described(linear);
    const auto found = std::ranges::find(counts, wanted, &std::pair<Described, size_t>::first);
    if (found == counts.end()) {
      counts.emplace_back(wanted, 1);
    } else {
      ++found->second;
    }
  }
  return std::ranges::max_element(counts, {}, &std::pair<Described, size_t>::second)->first;
}

/// `names`, and those of what servers load as one of them.
std::vector<std::string> with_fused(std::vector<std::string> names, const std::vector<std::string>& others) {
  std::ranges::move(fused_names(names, others), std::back_inserter(names));
  return names;
}

io::Json setting_json(const Described& all) {
  const int group = all.setting.group == formats::whole_row ? -1 : all.setting.group;
  return {
      {"bits", all.setting.bits}, {"group_size", group}, {"desc_act", all.act_order}, {"sym", all.setting.symmetric}};
}

}  // namespace

GptqConfig::GptqConfig(const DialectSource& source) : common_(read_setting(source, {})) {
  if (const auto words = config_text(source, {"pack_dtype"}, "int32"); words != "int32") {
    throw Error(ErrorCode::unsupported, concat(source.place, ": pack_dtype ", printable(words)))
        .detail("GPTQ checkpoints are read with words of int32");
  }
  if (!auto_round_words(source).empty()) {
    read_auto_round(source);
    return;
  }
  const io::Json* const dynamic = config_overrides(source, "dynamic");
  if (dynamic == nullptr) return;
  for (const auto& [key, value] : dynamic->items()) {
    const std::string place = concat(source.place, ": dynamic[\"", printable(key), "\"]");
    const bool left_out = key.starts_with("-:"), marked = left_out || key.starts_with("+:");
    GptqSetting setting = common_;
    setting.left_out = left_out;
    if (value.is_object()) {
      setting = read_setting({value, place, source.checkpoint, source.source_dtype}, setting);
    } else if (!value.is_null()) {
      throw Error(ErrorCode::bad_file, place + " is not an object");
    }
    rules_.push_back({text::Regex(std::string_view(key).substr(marked ? 2 : 0), place), setting});
  }
}

/// AutoRound lists linears of other settings by their paths, the ends of those, or expressions; 16 bits: it is not packed.
void GptqConfig::read_auto_round(const DialectSource& source) {
  const io::Json* const extra = config_overrides(source, "extra_config");
  if (extra == nullptr) return;
  for (const auto& [key, value] : extra->items()) {
    const std::string place = concat(source.place, ": extra_config[\"", printable(key), "\"]");
    if (!value.is_object()) throw Error(ErrorCode::bad_file, place + " is not an object");
    const DialectSource entry{value, place, source.checkpoint, source.source_dtype};
    GptqSetting setting = common_;
    setting.left_out = config_integer(entry, {"bits"}, common_.bits, 1, 32) >= 16;
    if (!setting.left_out) setting = read_setting(entry, setting);
    const bool path = key.find_first_of("*+?^$()[]{}|\\") == std::string::npos;
    rules_.push_back(
        {text::Regex(path ? concat("(?:.*\\.)?", exactly(key).substr(1)) : concat(".*(?:", key, ")"), place), setting});
  }
}

GptqSetting GptqConfig::setting(std::string_view linear) {
  for (const Rule& rule : rules_) {
    const auto match = rule.expression.search(linear, 0, budget_);
    if (match && match->begin == 0) return rule.setting;
  }
  return common_;
}

bool is_gptq(const DialectSource& source) {
  if (auto_round_words(source) == "gptq") return true;
  if (source.config.contains("quant_method")) {
    if (config_text(source, {"quant_method"}, "") != "gptq") return false;
  } else if (!source.config.contains("desc_act")) {
    return false;
  }
  return gptq_format(source) != "marlin" && !config_flag(source, {"is_marlin_format"}, false);
}

std::string gptq_format(const DialectSource& source) {
  return config_text(source, {"checkpoint_format", "format"}, "gptq");
}

namespace {

constexpr std::string_view own_blocks = "model.layers", wrapped_blocks = "model.language_model.layers";

/// In whose blocks all of these stand, "model.layers" or "model.language_model.layers"; nothing where they stand elsewhere,
/// by names that transformers has no modules of, or where they are experts.
std::optional<std::string> common_blocks(const std::vector<std::string>& names) {
  constexpr std::string_view layers = ".layers.";
  std::optional<std::string> common;
  for (const auto& name : names) {
    const size_t at = name.find(layers);
    if (at == std::string::npos || name.find(".experts.") != std::string::npos) return std::nullopt;
    const std::string blocks = name.substr(0, at + layers.size() - 1);
    const bool known = blocks == own_blocks || blocks == wrapped_blocks;
    if (!known || (common && *common != blocks)) return std::nullopt;
    common = blocks;
  }
  return common;
}

/// Whether one is too narrow a part of a delta net to be packed by anybody.
bool has_decays(const std::vector<std::string>& kept) {
  return std::ranges::any_of(kept, [](const std::string& name) {
    return name.ends_with(".in_proj_a") || name.ends_with(".in_proj_b") || name.ends_with(".in_proj_ba");
  });
}

/// The blocks in which all packed linears stand, "model.layers", whatever they are; nothing where they are in several.
std::optional<std::string> blocks_of(const std::vector<std::string>& names) {
  constexpr std::string_view layers = ".layers.";
  std::optional<std::string> common;
  for (const auto& name : names) {
    const size_t at = name.find(layers);
    if (name == head) continue;
    if (at == std::string::npos) return std::nullopt;
    std::string blocks = name.substr(0, at + layers.size() - 1);
    if (common && *common != blocks) return std::nullopt;
    common = std::move(blocks);
  }
  return common;
}

/// The setting of a linear where it is not that of all.
io::Json extra_json(const GptqSetting& setting) {
  return {{"bits", setting.bits},
          {"group_size", setting.group == formats::whole_row ? -1 : setting.group},
          {"sym", setting.symmetric},
          {"data_type", "int"}};
}

/// The names that have a setting so far.
template <class Setting>
std::vector<std::string>& names_of(std::vector<std::pair<Setting, std::vector<std::string>>>& settings,
                                   const Setting& wanted) {
  const auto found = std::ranges::find_if(settings, [&](const auto& of) { return of.first == wanted; });
  return (found == settings.end() ? settings.emplace_back(wanted, std::vector<std::string>{}) : *found).second;
}

/// Some of what is packed, and what servers load as one where all of it is among them.
std::vector<std::string> with_fused_among(const std::vector<std::string>& names, const std::vector<std::string>& packed,
                                          std::vector<std::string> others) {
  std::ranges::copy_if(packed, std::back_inserter(others),
                       [&](const std::string& name) { return std::ranges::find(names, name) == names.end(); });
  return with_fused(names, others);
}

}  // namespace

io::Json describe_auto_round(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  const GptqSetting common = most_common(linears).setting;
  std::vector<std::string> packed;
  for (const auto& linear : linears) packed.push_back(linear.name);
  io::Json extra = io::Json::object();
  for (const auto& name : with_fused(kept, packed)) extra[name] = {{"bits", 16}, {"data_type", "float"}};
  std::vector<std::pair<GptqSetting, std::vector<std::string>>> others;
  for (const auto& linear : linears) {
    const GptqSetting wanted = setting_of(linear);
    // Heads are outside of blocks.
    if (wanted == common && linear.name != head) continue;
    names_of(others, wanted).push_back(linear.name);
  }
  for (const auto& [wanted, names] : others) {
    for (const auto& name : with_fused_among(names, packed, kept)) extra[name] = extra_json(wanted);
  }
  io::Json json = {{"quant_method", "auto-round"}, {"packing_format", "auto_round:auto_gptq"}};
  json.update(extra_json(common));
  if (const auto blocks = blocks_of(packed)) json["block_name_to_quantize"] = *blocks;
  if (!extra.empty()) json["extra_config"] = std::move(extra);
  return json;
}

io::Json describe_gptq(std::string_view format, const std::vector<DialectLinear>& linears,
                       const std::vector<std::string>& kept) {
  const Described common = most_common(linears);
  io::Json dynamic = io::Json::object();
  std::vector<std::string> packed;
  for (const auto& linear : linears) packed.push_back(linear.name);
  // Servers match the names of what they fuse.
  for (const auto& name : with_fused(kept, packed)) {
    if (name != head) dynamic["-:" + exactly(name)] = io::Json::object();
  }
  const bool leaves_some = !dynamic.empty(), decays = has_decays(kept);
  std::vector<std::pair<Described, std::vector<std::string>>> others;
  bool has_head = false;
  for (const auto& linear : linears) {
    has_head = has_head || linear.name == head;
    const Described wanted = described(linear);
    if (wanted == common) continue;
    names_of(others, wanted).push_back(linear.name);
  }
  for (const auto& [wanted, names] : others) {
    for (const auto& name : with_fused_among(names, packed, kept)) dynamic["+:" + exactly(name)] = setting_json(wanted);
  }
  io::Json json = {{"quant_method", "gptq"}, {"checkpoint_format", format}};
  json.update(setting_json(common));
  json["pack_dtype"] = "int32";
  json["lm_head"] = has_head;
  // transformers' own loader finds plain models' layers by itself, and packs every linear in them but for these, whatever
  // `dynamic` says.
  std::erase(packed, head);
  const auto blocks = common_blocks(packed);
  if (leaves_some && blocks && (decays || *blocks == wrapped_blocks)) {
    json["block_name_to_quantize"] = *blocks;
    json["modules_in_block_to_quantize"] = io::Json::array({packed});
  }
  if (!dynamic.empty()) json["dynamic"] = std::move(dynamic);
  json["meta"] = {{"quantizer", {"w4q"}}};
  return json;
}

}  // namespace w4q::checkpoint
