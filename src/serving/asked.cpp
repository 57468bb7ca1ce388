#include "serving/asked.h"

#include <algorithm>
#include <set>

#include "core/text.h"

namespace w4q::serving {
namespace {

using io::Json;

constexpr std::string_view class_name = "Linear";

int64_t group_of(const Json& object, const char* key, int64_t otherwise) {
  const int64_t group = integer(object, key).value_or(otherwise);
  return group <= 0 ? -1 : group;
}

Form form_of_ints(const StoredModel& model) {
  if (model.method() == Method::awq) return Form::awq;
  if (model.method() == Method::auto_round) {
    const std::string words =
        concat(text(model.quantization(), "packing_format"), " ", text(model.quantization(), "backend"));
    return words.find("awq") == std::string::npos ? Form::gptq : Form::awq;
  }
  return Form::gptq;
}

/// The keys of GPTQ, AWQ and AutoRound over what `common` says.
StatedScheme integers(const Json& object, StatedScheme common) {
  for (const char* key : {"bits", "w_bit"}) {
    if (const auto bits = integer(object, key)) common.bits = static_cast<int>(*bits);
  }
  for (const char* key : {"group_size", "q_group_size"}) common.group = group_of(object, key, common.group);
  common.symmetric = boolean(object, "sym").value_or(common.symmetric);
  if (const auto zeros = boolean(object, "zero_point")) common.symmetric = !*zeros;
  common.act_order = boolean(object, "desc_act").value_or(common.act_order);
  return common;
}

StatedScheme read_blocks(const Json& block, StatedScheme scheme) {
  scheme.form = Form::fp8, scheme.bits = 8;
  if (block.is_array() && block.size() == 2 && block[0].is_number_integer() && block[1].is_number_integer()) {
    scheme.block_rows = block[0].get<int64_t>(), scheme.block_cols = block[1].get<int64_t>();
  }
  return scheme;
}

/// Humming's keys over what `common` says; each stands under several names.
StatedScheme humming_scheme(const Json& object, StatedScheme common) {
  const auto last_text = [&](std::initializer_list<const char*> keys) {
    std::string found;
    for (const char* key : keys) found = found.empty() ? text(object, key) : found;
    return found;
  };
  common = integers(object, common);
  const std::string codes = last_text({"b_dtype", "weight_dtype", "dtype"});
  const size_t digit = codes.find_first_of("0123456789");
  if (digit != std::string::npos) common.bits = codes[digit] - '0';
  for (const char* key : {"group_size", "weight_scale_group_size"}) common.group = group_of(object, key, common.group);
  for (const char* key : {"group_size_n", "weight_scale_group_size_n"}) {
    common.block_rows = integer(object, key).value_or(common.block_rows);
  }
  if (const auto zeros = boolean(object, "has_zero_point")) common.symmetric = !*zeros;
  return common;
}

StatedScheme modelopt_scheme(std::string_view algorithm, const Json& object) {
  if (algorithm.find("MXFP8") != std::string_view::npos) return {.form = Form::mxfp8, .bits = 8, .group = 32};
  if (algorithm.find("NVFP4") != std::string_view::npos) {
    return {.form = Form::nvfp4_modelopt, .bits = 4, .group = group_of(object, "group_size", 16)};
  }
  if (algorithm.find("PB_WO") != std::string_view::npos || algorithm.find("BLOCK") != std::string_view::npos) {
    return {.form = Form::fp8, .bits = 8, .block_rows = 128, .block_cols = 128};
  }
  if (algorithm.find("FP8") != std::string_view::npos) return {.form = Form::fp8, .bits = 8};
  return {.form = Form::other, .bits = 4};
}

StatedScheme ct_scheme(const Json& weights, std::string_view format) {
  StatedScheme scheme;
  scheme.bits = static_cast<int>(integer(weights, "num_bits").value_or(8));
  const std::string strategy = text(weights, "strategy");
  scheme.group =
      strategy.empty() || strategy.find("group") != std::string::npos ? group_of(weights, "group_size", -1) : -1;
  scheme.symmetric = boolean(weights, "symmetric").value_or(true);
  const std::string order = text(weights, "actorder");
  scheme.act_order = order == "group" || order == "dynamic" || boolean(weights, "actorder").value_or(false);
  if (text(weights, "type") != "float") {
    scheme.form = format == "int-quantized" || format == "naive-quantized" ? Form::int8 : Form::words;
  } else if (scheme.bits == 4) {
    scheme.form = scheme.group == 32 ? Form::mxfp4 : Form::nvfp4;
  } else if (scheme.group == 32) {
    scheme.form = Form::mxfp8;
  } else {
    scheme = read_blocks(member(weights, "block_structure"), scheme);
  }
  return scheme;
}

std::vector<std::string> lists_of(const Json& quantization, std::initializer_list<const char*> keys) {
  std::vector<std::string> entries;
  for (const char* key : keys) std::ranges::move(texts(quantization, key), std::back_inserter(entries));
  return entries;
}

}  // namespace

std::string to_text(const StatedScheme& scheme) {
  if (scheme.form == Form::plain) return "16 bit";
  const bool whole = scheme.form != Form::words && scheme.form != Form::awq && scheme.form != Form::gptq &&
                     scheme.form != Form::humming;
  if (whole) return std::string(to_string(scheme.form));
  return concat(scheme.bits, "-bit ", to_string(scheme.form), scheme.symmetric ? ", symmetric" : ", with zero points",
                scheme.group < 0 ? ", a scale a row" : concat(", groups of ", scheme.group));
}

std::vector<CtGroup> read_ct_groups(const StoredModel& model) {
  std::vector<CtGroup> groups;
  const Json& quantization = model.quantization();
  const Json& described = member(quantization, "config_groups");
  if (!described.is_object()) return groups;
  for (const auto& [name, group] : described.items()) {
    CtGroup read;
    read.name = name;
    read.format = text(group, "format").empty() ? text(quantization, "format") : text(group, "format");
    read.targets = texts(group, "targets");
    read.weights = member(group, "weights");
    read.input_activations = member(group, "input_activations");
    if (read.targets.size() == 1 && read.targets[0].ends_with("Attention")) continue;
    if (!read.weights.is_object()) continue;
    read.scheme = ct_scheme(read.weights, read.format);
    groups.push_back(std::move(read));
  }
  return groups;
}

std::vector<std::string> unfused_names(const Layer& layer) {
  if (layer.split == Split::experts) {
    std::set<std::string> names;
    for (const auto& part : layer.parts) {
      const ExpertPlace place = expert_place(part);
      if (place.expert <= 0) names.insert(place.expert < 0 ? part : concat(layer.name, ".0.", place.projection));
    }
    // The programs ask for gate, up and down of the first expert, also where experts are one tensor.
    if (std::ranges::all_of(layer.parts, [](const auto& part) { return expert_place(part).expert < 0; })) {
      return {layer.name + ".0.gate_proj", layer.name + ".0.up_proj", layer.name + ".0.down_proj"};
    }
    return {names.begin(), names.end()};
  }
  if (layer.fused == nullptr) return {layer.name};
  std::vector<std::string> names;
  for (const auto part : layer.fused->parts) names.push_back(concat(parent(layer.name), ".", part));
  return names;
}

AskedSchemes::AskedSchemes(const StoredModel& model) : model_(model) {
  const Json& quantization = model.quantization();
  const std::string& place = model.place();
  left_out_ = NameList(lists_of(quantization, {"ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers",
                                               "llm_int8_skip_modules"}),
                       place);
  switch (model.method()) {
    case Method::compressed_tensors:
      groups_ = read_ct_groups(model);
      break;
    case Method::awq:
    case Method::gptq:
    case Method::auto_round:
      common_ = integers(quantization, {.form = form_of_ints(model), .bits = 4, .group = 128});
      break;
    case Method::humming:
      common_ = humming_scheme(quantization, {.form = Form::humming, .bits = 4, .group = -1});
      break;
    case Method::fp8:
      common_ = read_blocks(member(quantization, "weight_block_size"), {});
      break;
    case Method::mxfp8:
      common_ = {.form = Form::mxfp8, .bits = 8, .group = 32};
      break;
    case Method::mxfp4:
      common_ = {.form = Form::mxfp4_stack, .bits = 4, .group = 32};
      break;
    case Method::modelopt:
      common_ = modelopt_scheme(text(quantization, "quant_algo"), quantization);
      break;
    default:
      break;
  }
  for (size_t index = 0; index < groups_.size(); ++index) {
    for (const auto& target : groups_[index].targets) {
      if (target.starts_with("re:")) {
        by_pattern_.emplace_back(Pattern(std::string_view(target).substr(3), place), index);
      } else if (target == class_name) {
        if (!by_class_) by_class_ = index;
      } else {
        by_name_.emplace(target, index);
      }
    }
  }
  const Json& rules = member(quantization, model.method() == Method::auto_round ? "extra_config" : "dynamic");
  if (rules.is_object() && common_) {
    for (const auto& [key, value] : rules.items()) {
      const bool out = key.starts_with("-:"), marked = out || key.starts_with("+:");
      const StatedScheme scheme =
          model.method() == Method::humming ? humming_scheme(value, *common_) : integers(value, *common_);
      if (model.method() == Method::auto_round && key.find_first_of("*+?^$()[]{}|\\") == std::string::npos) {
        mixed_.emplace(key, scheme);
        continue;
      }
      rules_.push_back({key, out, Pattern(std::string_view(key).substr(marked ? 2 : 0), place), scheme});
    }
  }
  const Json& mixed = member(quantization, "quantized_layers");
  if (mixed.is_object()) {
    for (const auto& [key, value] : mixed.items())
      mixed_.emplace(key, modelopt_scheme(text(value, "quant_algo"), value));
  }
}

std::optional<size_t> AskedSchemes::named_group(std::string_view name) const {
  if (const auto found = by_name_.find(name); found != by_name_.end()) return found->second;
  const auto found = std::ranges::find_if(by_pattern_, [&](const auto& entry) { return entry.first.matches(name); });
  return found == by_pattern_.end() ? std::nullopt : std::optional(found->second);
}

/// A name that stands for itself, then all parts by their names, then the class of all linears.
std::optional<size_t> AskedSchemes::ct_group(Program program, const Layer& layer) const {
  if (const auto named = named_group(layer.name)) return named;
  if (program == Program::sglang && by_class_) return by_class_;
  if (layer.fused != nullptr) {
    std::optional<size_t> first;
    bool all = true;
    for (const auto& name : unfused_names(layer)) {
      const auto group = named_group(name);
      if (!first) first = group;
      all = all && group.has_value();
    }
    if (all) return first;
  }
  // Heads are no class of linears in servers, but in transformers.
  if (is_head(layer.name) && describe(program).fuses) return std::nullopt;
  return by_class_;
}

Asked AskedSchemes::compressed_tensors(Program program, const Layer& layer) const {
  const Match match = program == Program::sglang ? &NameList::suffix : &NameList::exact;
  const auto left_out = [&](std::string_view name) { return (left_out_.*match)(name); };
  const auto names = unfused_names(layer);
  if (layer.split == Split::experts) {
    std::optional<Asked> common;
    for (const auto& name : names) {
      Asked asked;
      if (const std::string entry = left_out(name); !entry.empty()) {
        asked.by = concat("ignore: ", entry);
      } else if (const auto group = named_group(name) ? named_group(name) : by_class_) {
        asked.scheme = groups_[*group].scheme, asked.by = concat("config_groups.", groups_[*group].name);
      }
      if (common && (common->scheme != asked.scheme)) {
        return {{}, {}, concat("of expert 0, ", last_part(name), " has another scheme than the others")};
      }
      if (!common) common = asked;
    }
    return common.value_or(Asked{});
  }
  std::string entry = left_out(layer.name);
  if (entry.empty() && layer.fused != nullptr) {
    size_t count = 0;
    for (const auto& name : names) {
      const std::string found = left_out(name);
      if (!found.empty()) ++count, entry = found;
    }
    if (count != 0 && count != names.size()) {
      return {{}, {}, concat("ignore leaves out ", count, " of its ", names.size(), " parts")};
    }
  }
  if (!entry.empty()) return {{}, concat("ignore: ", entry), {}};
  const auto group = ct_group(program, layer);
  if (!group) {
    if (program == Program::sglang && !is_head(layer.name)) return {{}, {}, "no target of config_groups names it"};
    return {{}, "config_groups, whose targets do not name it", {}};
  }
  return {groups_[*group].scheme, concat("config_groups.", groups_[*group].name), {}};
}

const AskedSchemes::Rule* AskedSchemes::rule_of(std::string_view name) const {
  const auto found = std::ranges::find_if(rules_, [&](const Rule& rule) { return rule.pattern.matches(name); });
  return found == rules_.end() ? nullptr : &*found;
}

bool AskedSchemes::is_plain(const Layer& layer) const {
  return std::ranges::all_of(layer.parts,
                             [&](const auto& part) { return model_.linears().find(part)->second.form == Form::plain; });
}

Asked AskedSchemes::gptq(Program program, const Layer& layer) const {
  const bool server = describe(program).fuses;
  // vLLM asks the files' own types which linears are packed; servers match rules on the names of fused layers.
  if (program == Program::vllm && layer.split != Split::experts) {
    size_t plain = 0;
    for (const auto& part : layer.parts) plain += model_.linears().find(part)->second.form == Form::plain ? 1 : 0;
    if (plain != 0 && plain != layer.parts.size()) {
      return {{}, {}, concat(plain, " of its ", layer.parts.size(), " parts are in 16 bit")};
    }
    if (plain != 0) return {{}, "the types of its tensors", {}};
  }
  if (is_head(layer.name) && server && !boolean(model_.quantization(), "lm_head").value_or(false)) {
    return {{}, "lm_head: false", {}};
  }
  const Rule* const rule = rule_of(layer.name);
  if (rule == nullptr) return {common_, "the settings of all linears", {}};
  if (rule->leaves_out) return {{}, concat("dynamic: ", rule->text), {}};
  return {rule->scheme, concat("dynamic: ", rule->text), {}};
}

Asked AskedSchemes::auto_round(const Layer& layer) const {
  const auto of = [&](std::string_view name) -> StatedScheme {
    if (const auto found = mixed_.find(name); found != mixed_.end()) return found->second;
    if (const Rule* const rule = rule_of(name)) return rule->scheme;
    for (const auto& [key, scheme] : mixed_) {
      if (name.ends_with("." + key)) return scheme;
    }
    StatedScheme scheme = *common_;
    const Json& blocks = member(model_.quantization(), "block_name_to_quantize");
    std::vector<std::string> prefixes = texts(model_.quantization(), "block_name_to_quantize");
    if (blocks.is_string()) {
      std::string list = blocks.get<std::string>();
      for (size_t comma = list.find(','); comma != std::string::npos; comma = list.find(',')) {
        prefixes.push_back(list.substr(0, comma));
        list.erase(0, comma + 1);
      }
      prefixes.push_back(list);
    }
    const bool outside = !prefixes.empty() &&
                         std::ranges::none_of(prefixes, [&](const auto& prefix) { return name.starts_with(prefix); });
    if (outside || is_head(name)) scheme.bits = 16;
    return scheme;
  };
  const auto names = unfused_names(layer);
  std::optional<StatedScheme> common;
  if (mixed_.contains(layer.name)) {
    common = of(layer.name);
  } else {
    for (const auto& name : names) {
      const StatedScheme scheme = of(name);
      if (common && *common != scheme) return {{}, {}, "its parts have different entries in extra_config"};
      common = scheme;
    }
  }
  if (!common || common->bits >= 16) return {{}, "extra_config", {}};
  return {common, "the settings of all linears", {}};
}

Asked AskedSchemes::listed(const Layer& layer, Match match, bool fused_names, bool unfused, const char* key) const {
  const auto by = [&](const std::string& entry) { return Asked{{}, concat(key, ": ", entry), {}}; };
  if (fused_names || layer.fused == nullptr) {
    if (const std::string entry = (left_out_.*match)(layer.name); !entry.empty()) return by(entry);
  }
  if (unfused && layer.fused != nullptr) {
    size_t count = 0;
    std::string entry;
    const auto names = unfused_names(layer);
    for (const auto& name : names) {
      const std::string found = (left_out_.*match)(name);
      if (!found.empty()) ++count, entry = found;
    }
    if (count == names.size()) return by(entry);
    if (count != 0) return {{}, {}, concat(key, " leaves out ", count, " of its ", names.size(), " parts")};
  }
  return {common_, "the settings of all linears", {}};
}

Asked AskedSchemes::modelopt(const Layer& layer) const {
  Asked asked = listed(layer, &NameList::path_or_glob, true, true, "exclude_modules");
  if (!asked.scheme && asked.refused.empty()) return asked;
  if (asked.refused.empty()) {
    // A part of the name is enough, too.
    if (const std::string entry = left_out_.substring(layer.name); !entry.empty()) {
      return {{}, concat("exclude_modules: ", entry), {}};
    }
  }
  if (!mixed_.empty() && asked.refused.empty()) {
    std::optional<StatedScheme> common;
    for (const auto& name : unfused_names(layer)) {
      const auto found = mixed_.find(name);
      if (found == mixed_.end()) continue;
      if (common && *common != found->second) return {{}, {}, "its parts have different entries in quantized_layers"};
      common = found->second;
    }
    if (const auto found = mixed_.find(layer.name); found != mixed_.end()) common = found->second;
    return {common, "quantized_layers", {}};
  }
  return asked;
}

/// What config.json leaves out transformers takes for blocks of 128 × 128, servers for one scale a matrix; null is that to all.
bool AskedSchemes::takes_usual_blocks(Program program) const {
  return program == Program::transformers && model_.method() == Method::fp8 &&
         !model_.quantization().contains("weight_block_size");
}

Asked AskedSchemes::of(Program program, const Layer& layer) const {
  const bool server = describe(program).fuses;
  switch (model_.method()) {
    case Method::compressed_tensors:
      return compressed_tensors(program, layer);
    case Method::gptq:
      return gptq(program, layer);
    case Method::auto_round:
      return auto_round(layer);
    case Method::awq:
      if (is_head(layer.name) && server && !boolean(model_.quantization(), "lm_head").value_or(false)) {
        return {{}, "lm_head: false", {}};
      }
      if (!server) return listed(layer, &NameList::path_or_glob, true, true, "modules_to_not_convert");
      // vLLM asks the files' own types which linears are packed where the list is empty.
      if (program == Program::vllm && left_out_.empty() && is_plain(layer)) return {{}, "the types of its tensors", {}};
      return listed(layer, &NameList::substring, true, program == Program::vllm, "modules_to_not_convert");
    case Method::fp8:
    case Method::mxfp8: {
      if (is_head(layer.name) && server) return {{}, "heads, which stay in 16 bit", {}};
      if (layer.split == Split::experts) {
        const std::string entry = left_out_.held_by(layer.name);
        if (!entry.empty()) return {{}, concat("modules_to_not_convert: ", entry), {}};
      }
      const Match match = program == Program::vllm ? &NameList::exact : &NameList::path_or_glob;
      Asked asked = listed(layer, match, true, true, "modules_to_not_convert");
      if (asked.scheme && takes_usual_blocks(program)) asked.scheme->block_rows = asked.scheme->block_cols = 128;
      return asked;
    }
    case Method::mxfp4:
      if (layer.split == Split::experts) return {common_, "experts", {}};
      return {{}, "linears beside experts, which stay in 16 bit", {}};
    case Method::modelopt:
      return modelopt(layer);
    case Method::humming: {
      if (is_head(layer.name)) return {{}, "heads, which stay in 16 bit", {}};
      Asked asked = listed(layer, &NameList::substring, true, false, "ignore");
      if (!asked.scheme) return asked;
      const Rule* const rule = rule_of(layer.name);
      if (rule == nullptr) return asked;
      if (rule->leaves_out) return {{}, concat("dynamic: ", rule->text), {}};
      return {rule->scheme, concat("dynamic: ", rule->text), {}};
    }
    default:
      return {};
  }
}

}  // namespace w4q::serving
