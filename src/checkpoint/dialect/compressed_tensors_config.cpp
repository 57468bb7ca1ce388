#include "checkpoint/dialect/compressed_tensors_config.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/small_floats_config.h"
#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"
#include "text/work_budget.h"

namespace w4q::checkpoint {
namespace {

using io::Json;

constexpr std::string_view pattern_prefix = "re:";
constexpr std::string_view our_format = "pack-quantized";

[[noreturn]] void refuse(ErrorCode code, const std::string& place, const std::string& what) {
  throw Error(code, concat(place, ": ", what));
}

std::vector<CtTarget> read_targets(const Json& list, const std::string& place) {
  std::vector<CtTarget> result;
  if (list.is_null()) return result;
  if (!list.is_array()) refuse(ErrorCode::bad_file, place, "is not a list");
  for (const Json& entry : list) {
    if (!entry.is_string()) refuse(ErrorCode::bad_file, place, "holds something that is not a text");
    result.emplace_back(entry.get<std::string>(), place);
  }
  return result;
}

const Json& member(const Json& object, const char* key) {
  static const Json nothing;
  const auto found = object.find(key);
  return found == object.end() ? nothing : *found;
}

int read_group(const DialectSource& weights, const std::string& strategy) {
  const int group = config_group(weights, {"group_size"});
  if (strategy == "group" && group == formats::whole_row) {
    refuse(ErrorCode::bad_file, weights.place, "strategy \"group\" needs a group_size");
  }
  return strategy == "group" ? group : formats::whole_row;
}

CtWeights read_weights(const DialectSource& weights) {
  const std::string type = config_text(weights, {"type"}, "int");
  if (type != "int") refuse(ErrorCode::unsupported, weights.place, concat("weights of type ", printable(type)));
  config_flag(weights, {"dynamic"}, false);
  const bool grouped = weights.config.contains("group_size") && weights.config["group_size"].is_number_integer() &&
                       weights.config["group_size"] > 0;
  const std::string strategy = config_text(weights, {"strategy"}, grouped ? "group" : "channel");
  if (strategy != "group" && strategy != "channel" && strategy != "tensor") {
    refuse(ErrorCode::unsupported, weights.place, concat("strategy \"", printable(strategy), "\""));
  }
  return {static_cast<int>(config_integer(weights, {"num_bits"}, 8, 2, 8)), read_group(weights, strategy),
          !config_flag(weights, {"symmetric"}, true), strategy == "tensor"};
}

/// Formats that have tensors other than ours.
void check_format(const DialectSource& source, const std::string& place) {
  const std::string format = config_text(source, {"format"}, our_format);
  constexpr std::string_view known[] = {our_format, "mixed-precision", "int-quantized", "naive-quantized"};
  if (std::ranges::find(known, format) != std::end(known)) return;
  throw Error(ErrorCode::unsupported, concat(place, ": format \"", printable(format), "\""))
      .detail("only pack-quantized, int-quantized and naive-quantized are read of integers");
}

Json describe_weights(const formats::Scheme& scheme) {
  const bool channel = scheme.block == formats::whole_row;
  return {{"num_bits", scheme.bits},
          {"type", "int"},
          {"symmetric", !scheme.asymmetric},
          {"strategy", channel ? "channel" : "group"},
          {"group_size", channel ? Json(nullptr) : Json(scheme.block)},
          {"dynamic", false},
          {"actorder", scheme.act_order ? Json("group") : Json(nullptr)},
          {"block_structure", nullptr},
          {"observer", "minmax"},
          {"observer_kwargs", Json::object()}};
}

/// What a group of the config says; the scales' type is the tensors' own.
auto group_key(const formats::Scheme& scheme) {
  return std::tuple(scheme.bits, scheme.block, scheme.asymmetric, scheme.act_order);
}

}  // namespace

const ActivationForm compressed_tensors_cache{.float4 = {},
                                              .float8 = {},
                                              .keys = ".k_scale",
                                              .values = ".v_scale",
                                              .shape = {1},
                                              .state = state_float_activations};

CtTarget::CtTarget(std::string text, std::string_view place) : text_(std::move(text)) {
  if (!text_.starts_with(pattern_prefix)) return;
  pattern_.emplace_back(concat("\\A(?:", text_.substr(pattern_prefix.size()), ")"), place);
}

int CtTarget::rank(std::string_view module) const {
  if (text_ == module) return 2;
  if (!pattern_.empty()) {
    text::WorkBudget budget(module.size());
    if (pattern_.front().search(module, 0, budget)) return 1;
  }
  return text_ == "Linear" ? 0 : -1;
}

bool CtTarget::names(std::string_view module) const { return rank(module) >= 0; }

namespace {

/// A note where `key` says how values that are no weights are quantized; empty where it says nothing.
std::string other_quantization(const Json& object, const char* key, const std::string& place) {
  const Json& value = member(object, key);
  if (value.is_null()) return {};
  if (!value.is_object()) {
    refuse(ErrorCode::bad_file, place,
           concat("\"", key, "\" is ", printable(value.dump()), ", expected an object or null"));
  }
  return concat(place, ": ", key, " (num_bits ", printable(member(value, "num_bits").dump()), ", type ",
                printable(member(value, "type").dump()),
                ") is for programs that quantize while they run; w4q keeps the weights, and computes in 16 bit");
}

}  // namespace

CtConfig::CtConfig(const DialectSource& source, bool floats) : place_(source.place) {
  if (!floats) check_format(source, place_);
  const Json& groups = member(source.config, "config_groups");
  if (!groups.is_object()) refuse(ErrorCode::bad_file, place_, "has no config_groups");
  for (const auto& [name, group] : groups.items()) {
    const std::string place = concat(place_, ": config_groups.", printable(name));
    if (!group.is_object()) refuse(ErrorCode::bad_file, place, "is not an object");
    for (const char* key : {"input_activations", "output_activations"}) {
      if (std::string note = other_quantization(group, key, place); !note.empty()) notes_.push_back(std::move(note));
    }
    const Json& weights = member(group, "weights");
    if (weights.is_null()) continue;
    if (!weights.is_object()) refuse(ErrorCode::bad_file, place, "its weights are not an object");
    if (!floats) check_format({group, place, source.checkpoint}, place);
    groups_.push_back({read_targets(member(group, "targets"), place + ".targets"),
                       floats ? CtWeights{} : read_weights({weights, place + ".weights", source.checkpoint})});
  }
  if (std::string note = other_quantization(source.config, "kv_cache_scheme", place_); !note.empty()) {
    notes_.push_back(std::move(note));
  }
  ignore_ = read_targets(member(source.config, "ignore"), place_ + ".ignore");
}

const CtConfig::Group* CtConfig::find(std::string_view linear) const {
  const Group* best = nullptr;
  int best_rank = -1;
  for (const Group& group : groups_) {
    for (const CtTarget& target : group.targets) {
      const int rank = target.rank(linear);
      if (rank <= best_rank) continue;
      best_rank = rank;
      best = &group;
    }
  }
  return best;
}

const CtWeights& CtConfig::weights_of(const std::string& linear) const {
  const Group* group = find(linear);
  if (group != nullptr) return group->weights;
  throw Error(ErrorCode::bad_file, concat(printable(linear), ": is packed, but no target of config_groups names it"))
      .detail(concat("in ", place_));
}

bool CtConfig::ignores(std::string_view linear) const {
  return std::ranges::any_of(ignore_, [&](const CtTarget& target) { return target.names(linear); });
}

bool CtConfig::targets(std::string_view linear) const { return find(linear) != nullptr; }

Json describe_compressed_tensors(std::string_view version, const std::vector<DialectLinear>& linears,
                                 const std::vector<std::string>& kept) {
  const auto is_head = [](std::string_view name) { return name == "lm_head" || name.ends_with(".lm_head"); };
  std::vector<std::vector<const DialectLinear*>> groups;
  for (const DialectLinear& linear : linears) {
    const auto same = std::ranges::find_if(
        groups, [&](const auto& group) { return group_key(group.front()->scheme) == group_key(linear.scheme); });
    if (same == groups.end()) {
      groups.push_back({&linear});
    } else {
      same->push_back(&linear);
    }
  }
  Json described = Json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    Json targets = Json::array();
    if (groups.size() == 1) {
      targets.push_back("Linear");
      // Servers have heads of a class of their own.
      for (const DialectLinear* linear : groups[i]) {
        if (is_head(linear->name)) targets.push_back(linear->name);
      }
    } else {
      for (const DialectLinear* linear : groups[i]) targets.push_back(linear->name);
    }
    described[concat("group_", i)] = {{"targets", targets},
                                      {"weights", describe_weights(groups[i].front()->scheme)},
                                      {"input_activations", nullptr},
                                      {"output_activations", nullptr}};
  }
  std::vector<std::string> ignore = kept, packed;
  for (const DialectLinear& linear : linears) packed.push_back(linear.name);
  // The head is a module even where its weight is the embedding table's, and then not among `kept`.
  const bool packed_head = std::ranges::any_of(linears, is_head, &DialectLinear::name);
  if (!packed_head && std::ranges::none_of(ignore, is_head)) ignore.emplace_back("lm_head");
  ignore = names_wherever(std::move(ignore), packed);
  std::ranges::move(fused_names(kept, packed), std::back_inserter(ignore));
  return {{"quant_method", "compressed-tensors"}, {"format", our_format},
          {"quantization_status", "compressed"},  {"version", version},
          {"config_groups", described},           {"ignore", ignore},
          {"kv_cache_scheme", nullptr},           {"global_compression_ratio", nullptr}};
}

}  // namespace w4q::checkpoint
