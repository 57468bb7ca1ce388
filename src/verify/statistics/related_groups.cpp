#include "verify/statistics/related_groups.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>

#include "core/text.h"
#include "model/parameters.h"

namespace w4q::verify {
namespace {

using model::InputGroup;
using model::PlannedLinear;
using model::Role;

struct RoleName {
  std::string_view name;
  Role role;
};
constexpr RoleName role_names[] = {
    {"q_proj", Role::query},   {"k_proj", Role::key}, {"v_proj", Role::value},        {"o_proj", Role::output},
    {"gate_proj", Role::gate}, {"up_proj", Role::up}, {"down_proj", Role::down},      {"w1", Role::gate},
    {"w3", Role::up},          {"w2", Role::down},    {"gate_up_proj", Role::gate_up}};

/// Linears of one module, "model.layers.3.self_attn", by role.
using Module = std::map<Role, PlannedLinear>;

const PlannedLinear* find(const Module& module, Role role) {
  const auto found = module.find(role);
  return found == module.end() ? nullptr : &found->second;
}

int64_t stated(const io::Json& config, const char* key) {
  const auto text = config.find("text_config");
  const io::Json& object = text != config.end() && text->is_object() ? *text : config;
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

/// Channels of a head: as config.json says, or else the outputs' over the number of heads; 0: not known.
int64_t head_dim_of(const io::Json& config, int64_t inputs_of_output) {
  if (const int64_t size = stated(config, "head_dim"); size > 0) return size;
  const int64_t heads = stated(config, "num_attention_heads");
  return heads > 0 && inputs_of_output % heads == 0 ? inputs_of_output / heads : 0;
}

InputGroup readers_of_stream(const Module& module, std::initializer_list<Role> roles) {
  InputGroup group;
  for (const Role role : roles) {
    if (const auto* const linear = find(module, role)) group.linears.push_back(*linear);
  }
  if (!group.linears.empty()) group.width = group.linears.front().k, group.inputs = model::Basis::stream;
  return group;
}

/// What reads the outputs of `producer`, which several heads of inputs may share.
InputGroup reader_of(const PlannedLinear& reader, const PlannedLinear* producer, int64_t head_dim) {
  InputGroup group{.linears = {reader}, .width = reader.k};
  if (producer == nullptr || producer->n <= 0 || reader.k % producer->n != 0) return group;
  if (reader.k != producer->n) {
    if (head_dim <= 0 || producer->n % head_dim != 0) return group;
    group.head_dim = head_dim, group.heads_per_producer = reader.k / producer->n;
  }
  group.producer = producer->name;
  return group;
}

std::vector<InputGroup> groups_of(const Module& module, const io::Json& config, int64_t expert) {
  std::vector<InputGroup> groups;
  for (const auto roles :
       {std::initializer_list<Role>{Role::query, Role::key, Role::value}, {Role::gate, Role::up}, {Role::gate_up}}) {
    if (auto group = readers_of_stream(module, roles); !group.linears.empty()) groups.push_back(std::move(group));
  }
  if (const auto* const output = find(module, Role::output)) {
    groups.push_back(reader_of(*output, find(module, Role::value), head_dim_of(config, output->k)));
  }
  if (const auto* const down = find(module, Role::down)) groups.push_back(reader_of(*down, find(module, Role::up), 0));
  for (auto& group : groups) {
    if (expert >= 0) group.expert = expert;
  }
  return groups;
}

/// Of which module a linear is, and as what: "….mlp.experts.3.up_proj" of "….mlp.experts.3"; of an expert of a stack,
/// "….mlp.experts.down_proj.3", of the same.
std::pair<std::string, std::string> module_and_name(const std::string& path) {
  const size_t dot = path.rfind('.');
  const std::string last = path.substr(dot + 1);
  const size_t before = dot == std::string::npos || dot == 0 ? std::string::npos : path.rfind('.', dot - 1);
  if (before == std::string::npos || last.find_first_not_of("0123456789") != std::string::npos)
    return {path.substr(0, dot), last};
  return {concat(path.substr(0, before), ".", last), path.substr(before + 1, dot - before - 1)};
}

LayerGroups groups_by_name(const model::OpenedModel& model) {
  constexpr int64_t most_layers = 10000;
  std::map<std::pair<int64_t, std::string>, Module> modules;  // by layer and path
  std::map<std::string, int64_t> experts;                     // by path
  const int64_t layers_stated = stated(model.folder.config, "num_hidden_layers");
  for (const auto& parameter : model::parameters(model)) {
    const std::string path(model::module_path(parameter.name));
    if (!parameter.linear || parameter.shape.size() != 2 || !model::reason_to_leave(path, layers_stated).empty())
      continue;
    const auto place = model::layer_numbers(path);
    const auto [module, name] = module_and_name(path);
    const auto role = std::ranges::find(role_names, name, &RoleName::name);
    if (place.layer < 0 || place.layer >= most_layers || role == std::end(role_names)) continue;
    experts[module] = place.expert;
    modules[{place.layer, module}].emplace(
        role->role, PlannedLinear{.role = role->role, .name = path, .n = parameter.shape[0], .k = parameter.shape[1]});
  }
  LayerGroups layers;
  for (const auto& [place, module] : modules) {
    const auto& [layer, path] = place;
    layers.resize(std::max(layers.size(), static_cast<size_t>(layer) + 1));
    for (auto& group : groups_of(module, model.folder.config, experts.at(path))) {
      layers[static_cast<size_t>(layer)].push_back(std::move(group));
    }
  }
  return layers;
}

}  // namespace

LayerGroups related_groups(const model::OpenedModel& model) {
  if (model.config.architecture == nullptr) return groups_by_name(model);
  LayerGroups layers;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    layers.push_back(model::input_groups(model.config, layer));
  }
  return layers;
}

}  // namespace w4q::verify
