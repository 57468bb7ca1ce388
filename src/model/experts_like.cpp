#include "model/experts_like.h"

#include <algorithm>
#include <cctype>
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

std::vector<Part> parts(std::string_view module, int64_t rows, bool turn) {
  std::vector<Part> result;
  for (const ExpertPart& part : expert_parts(module, rows)) result.push_back({part.name, part.first_row, 1, part.rows});
  if (turn && result.size() == 2) result[0].step = 2, result[1].step = 2, result[1].first = 1;
  return result;
}

bool has_names(std::string_view module) {
  const auto found = expert_parts(module, 2);
  return found.front().name != module;
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

/// Whether a tensor or packed planes of a linear stand there.
bool holds_linear(const io::Checkpoint& tensors, const std::string& module) {
  const auto at = tensors.tensors().lower_bound(module + ".");
  return at != tensors.tensors().end() && at->first.starts_with(module + ".");
}

/// Stacks by the names that their experts have in `candidate`, all of them or none.
OpenedModel by_name(OpenedModel base, const OpenedModel& candidate) {
  const auto source = std::make_shared<const io::Checkpoint>(base.folder.tensors);
  const auto experts = experts_of(base);
  const bool turn = take_turns(base, candidate, experts);
  Derived made;
  Names hidden;
  for (const Expert& expert : experts) {
    const bool first = expert.module.ends_with(".0");
    if (first && !holds_linear(candidate.folder.tensors, expert_parts(expert.module, expert.n).front().name))
      return base;
    cut(source, expert, turn, made);
    hidden.insert(expert.module + ".weight");
  }
  if (made.empty()) return base;
  std::erase_if(base.apart, [&](const StackedExperts& stack) {
    return has_names(module_path(stack.expert(0))) && hidden.insert(stack.name).second;
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
  if (made.empty()) return base;
  base.folder.tensors = io::Checkpoint::derive(source, std::move(made), source->derivation(), hidden);
  base.config.mixture.storage = candidate.config.mixture.storage;
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
    if (at == std::string::npos || at + part.size() == name.size()) continue;
    const bool number = std::isdigit(static_cast<unsigned char>(name[at + part.size()])) != 0;
    (number ? result.names : result.stacks) = true;
  }
  return result;
}

}  // namespace

bool stacks_otherwise(const io::Checkpoint& base, const io::Checkpoint& candidate) {
  const Forms ours = forms(candidate), theirs = forms(base);
  return (theirs.stacks && ours.names) || (theirs.names && ours.stacks);
}

OpenedModel experts_like(OpenedModel base, const OpenedModel& candidate) {
  const auto& packed = base.folder.quantization.linears;
  if (!packed.empty() || !stacks_otherwise(base.folder.tensors, candidate.folder.tensors)) return base;
  return forms(base.folder.tensors).names ? in_stacks(std::move(base), candidate) : by_name(std::move(base), candidate);
}

}  // namespace w4q::model
