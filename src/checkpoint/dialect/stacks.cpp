#include "checkpoint/dialect/stacks.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/buffer.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

/// "T.3" → "T" and 3.
std::optional<std::pair<std::string_view, int64_t>> numbered(std::string_view linear) {
  const size_t dot = linear.rfind('.');
  if (dot == std::string_view::npos || linear.substr(0, dot).find("experts") == std::string_view::npos)
    return std::nullopt;
  const std::string_view digits = linear.substr(dot + 1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || number < 0) return std::nullopt;
  return std::pair(linear.substr(0, dot), number);
}

Shape with_experts(Shape shape, int64_t experts) {
  shape.insert(shape.begin(), experts);
  return shape;
}

}  // namespace

std::optional<StackedPart> stacked_part(const DialectRow& row, std::string_view tensor) {
  for (const auto& [part, whole] : row.stacks) {
    if (!tensor.ends_with(part)) continue;
    const auto expert = numbered(tensor.substr(0, tensor.size() - part.size()));
    if (expert) return StackedPart{concat(expert->first, whole), expert->second};
  }
  return std::nullopt;
}

io::Checkpoint take_apart(io::Checkpoint tensors, const QuantizationConfig& quantization) {
  if (quantization.dialect == nullptr || quantization.dialect->stacks.empty()) return tensors;
  const auto source = std::make_shared<const io::Checkpoint>(std::move(tensors));
  std::map<std::string, io::DerivedTensor, std::less<>> parts;
  std::set<std::string, std::less<>> wholes;
  for (const auto& [name, info] : quantization.linears) {
    for (const auto& tensor : info.stored) {
      auto place = stacked_part(*quantization.dialect, tensor.name);
      ensure(place.has_value(), concat(tensor.name, ": no part of a stack"));
      wholes.insert(place->whole);
      const auto size = static_cast<size_t>(tensor.size());
      parts.emplace(tensor.name, io::DerivedTensor{tensor.dtype, tensor.dtype, tensor.shape,
                                                   [source, size, place = std::move(*place)] {
                                                     const auto stack = source->load(place.whole);
                                                     const auto from = static_cast<size_t>(place.index) * size;
                                                     return Buffer::copy_of(stack->bytes.subspan(from, size));
                                                   }});
    }
  }
  return io::Checkpoint::derive(source, std::move(parts), source->derivation(), wholes);
}

std::vector<io::PlannedTensor> stacked_tensors(const DialectRow& row, std::vector<io::PlannedTensor> parts) {
  if (row.stacks.empty()) return parts;
  std::vector<io::PlannedTensor> wholes;
  std::map<std::string, std::set<int64_t>> experts;
  for (auto& part : parts) {
    auto place = stacked_part(row, part.name);
    if (!place) {
      throw Error(ErrorCode::unsupported,
                  concat(printable(part.name), ": ", row.name, " packs experts of stacks alone"))
          .hint("--keep it in 16 bit");
    }
    const auto [at, added] = experts.try_emplace(place->whole);
    at->second.insert(place->index);
    if (added) wholes.push_back({std::move(place->whole), part.dtype, std::move(part.shape)});
  }
  for (auto& whole : wholes) {
    const auto& found = experts.at(whole.name);
    const auto count = static_cast<int64_t>(found.size());
    if (*found.rbegin() != count - 1) {
      int64_t missing = 0;
      while (found.contains(missing)) ++missing;
      throw Error(ErrorCode::unsupported, concat(printable(whole.name), ": expert ", missing, " is not packed"))
          .detail(concat(row.name, " has all experts of a stack in one tensor"));
    }
    whole.shape = with_experts(std::move(whole.shape), count);
  }
  return wholes;
}

}  // namespace w4q::checkpoint
