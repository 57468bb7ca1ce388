#include "model/experts_like.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "model/parameters.h"

namespace w4q::model {
namespace {

/// Rows of an expert of a stack that are a linear where experts stand one by one.
struct Part {
  std::string name;
  int64_t first = 0, step = 1, rows = 0;
};

/// Stacks that have names of their own, and what they are called elsewhere.
struct StackName {
  std::string_view own, usual;
};
constexpr StackName stack_names[] = {{".block_sparse_moe.input_linear", ".block_sparse_moe.experts.gate_up_proj"},
                                     {".block_sparse_moe.output_linear", ".block_sparse_moe.experts.down_proj"}};

/// "….block_sparse_moe.input_linear.3" of Granite as other stacks are called.
std::string usual_name(std::string_view module) {
  for (const StackName& row : stack_names) {
    const size_t at = module.find(row.own);
    if (at == std::string_view::npos) continue;
    return std::string(module.substr(0, at)) + std::string(row.usual) + std::string(module.substr(at + row.own.size()));
  }
  return std::string(module);
}

std::vector<Part> parts(std::string_view module, int64_t rows, bool turn) {
  std::vector<Part> result;
  for (const ExpertPart& part : expert_parts(usual_name(module), rows))
    result.push_back({part.name, part.first_row, 1, part.rows});
  if (turn && result.size() == 2) result[0].step = 2, result[1].step = 2, result[1].first = 1;
  return result;
}

bool has_names(std::string_view module) {
  const std::string usual = usual_name(module);
  return expert_parts(usual, 2).front().name != usual;
}

/// An expert of a stack as a linear by itself.
struct Expert {
  std::string module;
  int64_t n = 0, k = 0;
};

/// All experts of stacks, taken apart or packed one by one, that have names where they stand one by one.
std::vector<Expert> experts_of(const OpenedModel& model) {
  std::vector<Expert> experts;
  for (const auto& [name, info] : model.folder.tensors.tensors()) {
    const std::string_view module = module_path(name);
    if (info.shape.size() == 2 && is_weight_dtype(info.dtype) && module != name && has_names(module))
      experts.push_back({std::string(module), info.shape[0], info.shape[1]});
  }
  for (const auto& [name, info] : model.folder.quantization.linears) {
    if (has_names(name)) experts.push_back({name, info.n, info.k});
  }
  return experts;
}

/// A matrix [n, k] in fp32; empty: it is not there, or of another shape.
std::vector<float> matrix(const checkpoint::Folder& folder, const std::string& name, int64_t n, int64_t k) {
  if (!folder.tensors.contains(name)) return {};
  const auto loaded = folder.tensors.load(name);
  if (loaded->shape != Shape{n, k} || !is_weight_dtype(loaded->dtype)) return {};
  std::vector<float> values(static_cast<size_t>(n * k));
  widen(loaded->bytes, loaded->dtype, values);
  return values;
}

checkpoint::Folder plain(const checkpoint::Folder& folder) {
  return folder.quantization.linears.empty() ? folder : decoded(folder);
}

/// Whether gates and ups take turns in the stacks of one of two versions of a model, of which the other has them by name.
bool take_turns(const OpenedModel& stacked, const OpenedModel& named, const std::vector<Expert>& experts) {
  if (stacked.config.architecture != nullptr) return stacked.config.mixture.storage == ExpertStorage::stacked_in_turn;
  for (const Expert& expert : experts) {
    const auto halves = parts(expert.module, expert.n, false);
    if (halves.size() != 2) continue;
    const auto k = static_cast<size_t>(expert.k), rows = static_cast<size_t>(halves.front().rows);
    const auto whole = matrix(plain(stacked.folder), expert.module + ".weight", expert.n, expert.k);
    const auto gate = matrix(plain(named.folder), halves.front().name + ".weight", halves.front().rows, expert.k);
    if (whole.empty() || gate.empty()) continue;
    double as_halves = 0, in_turn = 0;
    for (size_t row = 0; row < rows; ++row) {
      for (size_t col = 0; col < k; ++col) {
        const double value = gate[row * k + col];
        as_halves += value * double{whole[row * k + col]}, in_turn += value * double{whole[2 * row * k + col]};
      }
    }
    return in_turn > as_halves;
  }
  return false;
}

using Derived = std::map<std::string, io::DerivedTensor, std::less<>>;
using Names = std::set<std::string, std::less<>>;

/// The linears that the rows of an expert are.
void cut(const std::shared_ptr<const io::Checkpoint>& source, const Expert& expert, bool turn, Derived& made) {
  const std::string whole = expert.module + ".weight";
  const DType dtype = source->at(whole).dtype;
  const auto width = static_cast<size_t>(expert.k * dtype_bits(dtype) / 8);
  for (const Part& part : parts(expert.module, expert.n, turn)) {
    auto make = [source, whole, part, width] {
      const auto loaded = source->load(whole);
      Buffer result(static_cast<size_t>(part.rows) * width);
      for (int64_t row = 0; row < part.rows; ++row) {
        const auto from = static_cast<size_t>(part.first + row * part.step);
        std::memcpy(result.bytes().data() + static_cast<size_t>(row) * width, loaded->bytes.data() + from * width,
                    width);
      }
      return result;
    };
    made.emplace(part.name + ".weight", io::DerivedTensor{dtype, dtype, {part.rows, expert.k}, std::move(make)});
  }
}

/// An expert of a stack, of the linears that its rows are; false: `source` does not hold them.
bool join(const std::shared_ptr<const io::Checkpoint>& source, const Expert& expert, bool turn, Derived& made) {
  const auto of = parts(expert.module, expert.n, turn);
  const auto holds = [&](const Part& part) {
    const std::string name = part.name + ".weight";
    return source->contains(name) && source->at(name).shape == Shape{part.rows, expert.k} &&
           source->at(name).dtype == source->at(of.front().name + ".weight").dtype;
  };
  if (!std::ranges::all_of(of, holds)) return false;
  const DType dtype = source->at(of.front().name + ".weight").dtype;
  const auto width = static_cast<size_t>(expert.k * dtype_bits(dtype) / 8);
  auto make = [source, of, width, n = expert.n] {
    Buffer result(static_cast<size_t>(n) * width);
    for (const Part& part : of) {
      const auto loaded = source->load(part.name + ".weight");
      for (int64_t row = 0; row < part.rows; ++row) {
        const auto to = static_cast<size_t>(part.first + row * part.step);
        std::memcpy(result.bytes().data() + to * width, loaded->bytes.data() + static_cast<size_t>(row) * width, width);
      }
    }
    return result;
  };
  made.emplace(expert.module + ".weight", io::DerivedTensor{dtype, dtype, {expert.n, expert.k}, std::move(make)});
  return true;
}

/// Where the bias of an expert stands in that of its stack, "….experts.gate_up_proj_bias" [experts, n].
struct BiasRow {
  std::string name;
  int64_t expert = 0;
};
BiasRow bias_row(const Expert& expert) {
  const size_t dot = expert.module.rfind('.');
  return {expert.module.substr(0, dot) + "_bias", std::atoll(expert.module.c_str() + dot + 1)};
}

/// Whether `tensors` holds biases of a stack in which this expert has a row.
bool holds_bias(const io::Checkpoint& tensors, const BiasRow& row, int64_t n) {
  if (!tensors.contains(row.name)) return false;
  const io::TensorInfo& info = tensors.at(row.name);
  return info.shape.size() == 2 && info.shape[1] == n && row.expert < info.shape[0] && is_weight_dtype(info.dtype);
}

/// The biases of the linears that the rows of an expert are, in the order of these.
void cut_bias(const std::shared_ptr<const io::Checkpoint>& source, const Expert& expert, bool turn, Derived& made,
              Names& hidden) {
  const BiasRow row = bias_row(expert);
  if (!holds_bias(*source, row, expert.n)) return;
  hidden.insert(row.name);
  const DType dtype = source->at(row.name).dtype;
  const auto width = static_cast<size_t>(dtype_bits(dtype) / 8), n = static_cast<size_t>(expert.n);
  for (const Part& part : parts(expert.module, expert.n, turn)) {
    auto make = [source, row, part, width, n] {
      const auto loaded = source->load(row.name);
      const std::byte* const from = loaded->bytes.data() + static_cast<size_t>(row.expert) * n * width;
      Buffer result(static_cast<size_t>(part.rows) * width);
      for (int64_t i = 0; i < part.rows; ++i) {
        std::memcpy(result.bytes().data() + static_cast<size_t>(i) * width,
                    from + static_cast<size_t>(part.first + i * part.step) * width, width);
      }
      return result;
    };
    made.emplace(part.name + ".bias", io::DerivedTensor{dtype, dtype, {part.rows}, std::move(make)});
  }
}

/// The biases of a stack as `candidate` has them, of those of the linears that its experts are; nothing where `source`
/// lacks one of them.
void join_biases(const std::shared_ptr<const io::Checkpoint>& source, const io::Checkpoint& candidate,
                 const std::vector<Expert>& experts, bool turn, Derived& made, Names& hidden) {
  struct Piece {
    Part part;
    int64_t expert = 0;
  };
  std::map<std::string, std::vector<Piece>> stacks;
  std::map<std::string, int64_t> sizes;
  for (const Expert& expert : experts) {
    const BiasRow row = bias_row(expert);
    if (!holds_bias(candidate, row, expert.n) || source->contains(row.name)) continue;
    for (const Part& part : parts(expert.module, expert.n, turn)) stacks[row.name].push_back({part, row.expert});
    sizes[row.name] += expert.n;
  }
  for (const auto& [name, pieces] : stacks) {
    const Shape& shape = candidate.at(name).shape;
    const std::string first = pieces.front().part.name + ".bias";
    if (!source->contains(first) || sizes[name] != element_count(shape)) continue;
    const DType dtype = source->at(first).dtype;
    const auto fits = [&](const Piece& piece) {
      const std::string bias = piece.part.name + ".bias";
      return source->contains(bias) && source->at(bias).dtype == dtype &&
             source->at(bias).shape == Shape{piece.part.rows};
    };
    if (!is_weight_dtype(dtype) || !std::ranges::all_of(pieces, fits)) continue;
    const auto width = static_cast<size_t>(dtype_bits(dtype) / 8);
    auto make = [source, pieces = pieces, shape, width] {
      Buffer result(static_cast<size_t>(element_count(shape)) * width);
      for (const auto& [part, expert] : pieces) {
        const auto loaded = source->load(part.name + ".bias");
        for (int64_t i = 0; i < part.rows; ++i) {
          const auto to = static_cast<size_t>(expert * shape[1] + part.first + i * part.step);
          std::memcpy(result.bytes().data() + to * width, loaded->bytes.data() + static_cast<size_t>(i) * width, width);
        }
      }
      return result;
    };
    for (const Piece& piece : pieces) hidden.insert(piece.part.name + ".bias");
    made.emplace(name, io::DerivedTensor{dtype, dtype, shape, std::move(make)});
  }
}

/// Whether a tensor or packed planes of a linear stand there.
bool holds_linear(const io::Checkpoint& tensors, const std::string& module) {
  const auto at = tensors.tensors().lower_bound(module + ".");
  return at != tensors.tensors().end() && at->first.starts_with(module + ".");
}

/// The stack that an expert belongs to.
std::string stack_of(std::string_view module) { return std::string(module.substr(0, module.rfind('.'))); }

/// Stacks by the names that their experts have in `candidate`; those of which it holds no first expert stay: layers for
/// further tokens that were left out.
OpenedModel by_name(OpenedModel base, const OpenedModel& candidate) {
  const auto source = std::make_shared<const io::Checkpoint>(base.folder.tensors);
  const auto experts = experts_of(base);
  const bool turn = take_turns(base, candidate, experts);
  Derived made;
  Names hidden;
  std::map<std::string, bool> named;  // by stack
  for (const Expert& expert : experts) {
    const auto [at, added] = named.try_emplace(stack_of(expert.module));
    if (added)
      at->second = holds_linear(candidate.folder.tensors, parts(at->first + ".0", expert.n, turn).front().name);
    if (!at->second) continue;
    cut(source, expert, turn, made);
    cut_bias(source, expert, turn, made, hidden);
    hidden.insert(expert.module + ".weight");
  }
  if (made.empty()) return base;
  std::erase_if(base.apart, [&](const StackedExperts& stack) {
    const auto at = named.find(std::string(module_path(stack.name)));
    return at != named.end() && at->second && hidden.insert(stack.name).second;
  });
  base.folder.tensors = io::Checkpoint::derive(source, std::move(made), source->derivation(), hidden);
  base.config.mixture.storage = ExpertStorage::by_name;
  return base;
}

/// Experts that stand one by one as those of the stacks of `candidate`.
OpenedModel in_stacks(OpenedModel base, const OpenedModel& candidate) {
  const auto source = std::make_shared<const io::Checkpoint>(base.folder.tensors);
  auto experts = experts_of(candidate);
  std::erase_if(experts, [&](const Expert& expert) { return source->contains(expert.module + ".weight"); });
  const bool turn = take_turns(candidate, base, experts);
  Derived made;
  Names hidden;
  for (const Expert& expert : experts) {
    if (!join(source, expert, turn, made)) continue;
    for (const Part& part : parts(expert.module, expert.n, turn)) hidden.insert(part.name + ".weight");
  }
  join_biases(source, candidate.folder.tensors, experts, turn, made, hidden);
  if (made.empty()) return base;
  base.folder.tensors = io::Checkpoint::derive(source, std::move(made), source->derivation(), hidden);
  base.config.mixture.storage = candidate.config.mixture.storage;
  return base;
}

/// What the linears of an expert that stands by itself are called: by Mixtral and MiniMax, and by everyone else.
constexpr std::pair<std::string_view, std::string_view> role_names[] = {
    {"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}};

/// "….experts.3.w1.weight" as "….experts.3.gate_proj.weight" and the reverse; empty where it is neither.
std::string other_role(std::string_view name) {
  constexpr std::string_view part = ".experts.";
  const size_t begin = name.find(part);
  if (begin == std::string_view::npos) return {};
  const size_t number = name.find('.', begin + part.size());
  const size_t end = number == std::string_view::npos ? number : name.find('.', number + 1);
  if (end == std::string_view::npos) return {};
  const std::string_view role = name.substr(number + 1, end - number - 1);
  for (const auto& [first, second] : role_names) {
    if (role != first && role != second) continue;
    return std::string(name.substr(0, number + 1)) + std::string(role == first ? second : first) +
           std::string(name.substr(end));
  }
  return {};
}

/// Experts that stand one by one in both, with the names that their linears have in `candidate`.
OpenedModel roles_like(OpenedModel base, const OpenedModel& candidate) {
  const auto source = std::make_shared<const io::Checkpoint>(base.folder.tensors);
  const auto holds = [&](std::string_view tensor) {
    return holds_linear(candidate.folder.tensors, std::string(tensor.substr(0, tensor.rfind('.'))));
  };
  Derived made;
  Names hidden;
  for (const auto& [name, info] : source->tensors()) {
    const std::string other = other_role(name);
    if (other.empty() || source->contains(other) || holds(name) || !holds(other)) continue;
    auto make = [source, name = name] { return source->load(name).buffer(); };
    made.emplace(other, io::DerivedTensor{info.dtype, source->stored_dtype(name), info.shape, std::move(make)});
    hidden.insert(name);
  }
  if (made.empty()) return base;
  base.folder.tensors = io::Checkpoint::derive(source, std::move(made), source->derivation(), hidden);
  return base;
}

struct Forms {
  bool stacks = false, names = false;
};
Forms forms(const io::Checkpoint& tensors) {
  Forms result;
  for (const auto& [name, info] : tensors.tensors()) {
    constexpr std::string_view part = ".experts.";
    const size_t at = name.find(part);
    if (usual_name(name) != name) result.stacks = true;
    if (at == std::string::npos || at + part.size() == name.size()) continue;
    const bool number = std::isdigit(static_cast<unsigned char>(name[at + part.size()])) != 0;
    (number ? result.names : result.stacks) = true;
  }
  return result;
}

/// Whether one of the two has experts in stacks and the other one by one, by their names alone.
bool stacks_otherwise(const io::Checkpoint& base, const io::Checkpoint& candidate) {
  const Forms ours = forms(candidate), theirs = forms(base);
  return (theirs.stacks && ours.names) || (theirs.names && ours.stacks);
}

}  // namespace

OpenedModel experts_like(OpenedModel base, const OpenedModel& candidate) {
  const auto& packed = base.folder.quantization.linears;
  if (!packed.empty()) return base;
  if (!stacks_otherwise(base.folder.tensors, candidate.folder.tensors)) return roles_like(std::move(base), candidate);
  return forms(base.folder.tensors).names ? in_stacks(std::move(base), candidate) : by_name(std::move(base), candidate);
}

}  // namespace w4q::model
