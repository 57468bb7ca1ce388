#include "model/stacked_experts.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "model/config.h"
#include "model/parameters.h"

namespace w4q::model {
namespace {

/// An integer of config.json or of its text_config by the first of these keys that is there; 0: by none.
int64_t stated(const io::Json& config, std::initializer_list<const char*> keys) {
  const auto text = config.find("text_config");
  const io::Json* const inner = text != config.end() && text->is_object() ? &*text : nullptr;
  for (const io::Json* object : {inner, &config}) {
    for (const char* key : keys) {
      if (object == nullptr || !object->is_object()) continue;
      const auto found = object->find(key);
      if (found != object->end() && found->is_number_integer()) return found->get<int64_t>();
    }
  }
  return 0;
}

/// What a stack does with the residual stream, by the last part of its name.
enum class Side { reads, writes };
std::optional<Side> side_of(std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  for (const std::string_view part : {"gate", "up", "input", "w1", "w3", "fc1"}) {
    if (last.starts_with(part)) return Side::reads;
  }
  for (const std::string_view part : {"down", "output", "w2", "fc2"}) {
    if (last.starts_with(part)) return Side::writes;
  }
  return std::nullopt;
}

/// Whether inputs come first; nothing where both sizes are the stream's, or none is.
std::optional<bool> inputs_first(const Shape& shape, Side side, int64_t hidden) {
  if ((shape[1] == hidden) == (shape[2] == hidden)) return std::nullopt;
  return side == Side::reads ? shape[1] == hidden : shape[2] == hidden;
}

struct Candidate {
  const io::TensorInfo* info;
  std::optional<bool> inputs_first;
};

Buffer cut_out(const io::LoadedTensor& stack, const StackedExperts& form, int64_t index) {
  const auto width = static_cast<size_t>(dtype_bits(stack->dtype) / 8);
  const auto n = static_cast<size_t>(form.n), k = static_cast<size_t>(form.k);
  const std::byte* const from = stack->bytes.data() + static_cast<size_t>(index) * n * k * width;
  Buffer result(n * k * width);
  std::byte* const to = result.bytes().data();
  if (!form.inputs_first) {
    std::memcpy(to, from, n * k * width);
    return result;
  }
  for (size_t row = 0; row < n; ++row) {
    for (size_t col = 0; col < k; ++col)
      std::memcpy(to + (row * k + col) * width, from + (col * n + row) * width, width);
  }
  return result;
}

}  // namespace

std::string StackedExperts::expert(int64_t index) const { return concat(module_path(name), ".", index, ".weight"); }

std::vector<StackedExperts> stacked_experts(const checkpoint::Folder& folder) {
  const int64_t experts =
      stated(folder.config, {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  const int64_t hidden = stated(folder.config, {"hidden_size"});
  const int64_t layers = stated(folder.config, {"num_hidden_layers"});
  std::map<std::string, std::vector<Candidate>> mixtures;  // by the path that the stacks of one mixture share
  for (const auto& [name, info] : folder.tensors.tensors()) {
    const std::string_view module = module_path(name);
    const auto side = side_of(module);
    const bool all = info.shape.size() == 3 && info.shape[0] == experts;
    const bool shared = info.shape.size() == 3 && module.find(".shared_experts.") != std::string_view::npos;
    const bool is_stack = (all || shared) && is_weight_dtype(info.dtype);
    if (!is_stack || !side || !reason_to_leave(module, layers).empty()) continue;
    mixtures[std::string(module.substr(0, module.rfind('.')))].push_back(
        {&info, inputs_first(info.shape, *side, hidden)});
  }
  std::vector<StackedExperts> result;
  for (const auto& [path, stacks] : mixtures) {
    // Those of one mixture stand the same way: of a square one the other tells.
    const auto told = std::ranges::find_if(stacks, [](const auto& stack) { return stack.inputs_first.has_value(); });
    if (told == stacks.end()) continue;
    for (const auto& [info, own] : stacks) {
      const bool first = own.value_or(*told->inputs_first);
      const Shape& shape = info->shape;
      result.push_back({info->name, shape[0], shape[first ? 2 : 1], shape[first ? 1 : 2], first});
    }
  }
  return result;
}

std::vector<ExpertPart> expert_parts(std::string_view module, int64_t rows) {
  const std::string_view number = module.substr(module.rfind('.') + 1);
  const std::string_view stack = module.substr(0, module.size() - number.size() - 1);
  const std::string_view last = stack.substr(stack.rfind('.') + 1);
  const std::string_view experts = stack.substr(0, stack.size() - std::min(stack.size(), last.size() + 1));
  const bool numbered = !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
  if (!numbered || !experts.ends_with("experts")) return {{std::string(module), 0, rows}};
  const std::string expert = concat(experts, ".", number, ".");
  if (last == "down_proj") return {{concat(expert, last), 0, rows}};
  if (last != "gate_up_proj" || rows % 2 != 0) return {{std::string(module), 0, rows}};
  return {{expert + "gate_proj", 0, rows / 2}, {expert + "up_proj", rows / 2, rows / 2}};
}

bool stacks_halves(const io::Json& config) {
  try {
    const ModelConfig known = parse_config(config, "config.json");
    return known.mixture.experts > 0 && known.mixture.storage != ExpertStorage::stacked_in_turn;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::bad_file) throw;
    return false;
  }
}

io::Checkpoint take_apart(io::Checkpoint tensors, const std::vector<StackedExperts>& stacks) {
  if (stacks.empty()) return tensors;
  const auto source = std::make_shared<const io::Checkpoint>(std::move(tensors));
  std::map<std::string, io::DerivedTensor, std::less<>> experts;
  for (const auto& stack : stacks) {
    const DType dtype = source->at(stack.name).dtype;
    for (int64_t index = 0; index < stack.experts; ++index) {
      experts.emplace(stack.expert(index), io::DerivedTensor{dtype, dtype, {stack.n, stack.k}, [source, stack, index] {
                                                               return cut_out(source->load(stack.name), stack, index);
                                                             }});
    }
  }
  return io::Checkpoint::derive(source, std::move(experts), source->derivation());
}

}  // namespace w4q::model
