#include "checkpoint/turned_stacks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "core/text.h"

namespace w4q::checkpoint {
namespace {

using Source = std::shared_ptr<const io::Checkpoint>;
using Tensors = std::map<std::string, io::DerivedTensor, std::less<>>;

/// Values beside a stack: one of all experts, or one of each.
bool is_one_or_of_each(const io::TensorInfo& info, int64_t experts) {
  const int64_t count = element_count(info.shape);
  return info.dtype == DType::f32 && (count == 1 || count == experts);
}

/// Bytes [experts, k, n] → those of one of them, [n, k].
Buffer turned(const io::Checkpoint& tensors, const std::string& name, int64_t expert) {
  constexpr int64_t tile = 64;
  const auto loaded = tensors.load(name);
  const int64_t k = loaded->shape[1], n = loaded->shape[2];
  const std::byte* const from = loaded->bytes.data() + expert * k * n;
  Buffer result(static_cast<size_t>(k * n));
  std::byte* const to = result.bytes().data();
  for (int64_t first = 0; first < k; first += tile) {
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = first; col < std::min(first + tile, k); ++col) to[row * k + col] = from[col * n + row];
    }
  }
  return result;
}

class TurnedStacks {
 public:
  explicit TurnedStacks(Source source) : source_(std::move(source)) {}

  io::Checkpoint run() {
    for (const auto& [name, info] : source_->tensors()) {
      if (is_stack(name, info)) take(name, info);
    }
    if (made_.empty()) return *source_;
    return io::Checkpoint::derive(source_, std::move(made_), source_->derivation(), std::move(hidden_));
  }

 private:
  static std::string scales_of(const std::string& name) { return name + "_weight_scale"; }

  bool is_stack(const std::string& name, const io::TensorInfo& info) const {
    if (info.shape.size() != 3 || info.shape[0] == 0 || !source_->contains(scales_of(name))) return false;
    const io::TensorInfo& scales = source_->at(scales_of(name));
    if (info.dtype == DType::f8_e4m3) return is_one_or_of_each(scales, info.shape[0]) || has_powers(info, scales);
    const std::string factor = scales_of(name) + "_2";
    const Shape wanted = {info.shape[0], info.shape[1] / 8, info.shape[2]};
    return info.dtype == DType::u8 && scales.dtype == DType::f8_e4m3 && scales.shape == wanted &&
           info.shape[1] % 8 == 0 && source_->contains(factor) && is_one_or_of_each(source_->at(factor), info.shape[0]);
  }

  /// A power of two for 32 outputs each.
  static bool has_powers(const io::TensorInfo& codes, const io::TensorInfo& scales) {
    const Shape wanted = {codes.shape[0], codes.shape[1], codes.shape[2] / 32};
    return scales.dtype == DType::u8 && scales.shape == wanted && codes.shape[2] % 32 == 0;
  }

  void take(const std::string& name, const io::TensorInfo& info) {
    hidden_.insert(name);
    for (int64_t expert = 0; expert < info.shape[0]; ++expert) {
      const std::string module = concat(name, ".", expert);
      turn(name, module + ".weight", expert);
      const bool pairs = info.dtype == DType::u8;
      if (pairs || has_powers(info, source_->at(scales_of(name)))) {
        turn(scales_of(name), module + ".weight_scale", expert);
      } else {
        pick(scales_of(name), module + ".weight_scale", expert);
      }
      if (pairs) pick(scales_of(name) + "_2", module + ".weight_scale_2", expert);
      const std::string inputs = name + "_input_scale";
      if (source_->contains(inputs) && is_one_or_of_each(source_->at(inputs), info.shape[0]))
        pick(inputs, module + ".input_scale", expert);
    }
  }

  void turn(const std::string& name, const std::string& own, int64_t expert) {
    const io::TensorInfo& info = source_->at(name);
    hidden_.insert(name);
    made_.emplace(own, io::DerivedTensor{
                           info.dtype, info.dtype, {info.shape[2], info.shape[1]}, [source = source_, name, expert] {
                             return turned(*source, name, expert);
                           }});
  }

  /// One of the values that stand beside a stack.
  void pick(const std::string& name, const std::string& own, int64_t expert) {
    hidden_.insert(name);
    const auto make = [source = source_, name, expert] {
      const auto loaded = source->load(name);
      const int64_t at = element_count(loaded->shape) == 1 ? 0 : expert;
      Buffer result(sizeof(float));
      std::memcpy(result.bytes().data(), loaded->bytes.data() + at * static_cast<int64_t>(sizeof(float)),
                  sizeof(float));
      return result;
    };
    made_.emplace(own, io::DerivedTensor{DType::f32, DType::f32, {}, make});
  }

  const Source source_;
  Tensors made_;
  std::set<std::string, std::less<>> hidden_;
};

}  // namespace

io::Checkpoint turn_stacks(io::Checkpoint tensors) {
  return TurnedStacks(std::make_shared<const io::Checkpoint>(std::move(tensors))).run();
}

}  // namespace w4q::checkpoint
