// How the parameters of a model stand in a GGUF file: under which names, cut into which tensors, in which order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/views.h"
#include "model/config.h"
#include "model/parameters.h"

namespace w4q::gguf {

/// Some of the rows or columns of a matrix, in the order of a file.
class Order {
 public:
  /// Every `step`-th from `first` on, `count` in all.
  explicit Order(int64_t count, int64_t first = 0, int64_t step = 1) : count_(count), first_(first), step_(step) {}
  explicit Order(std::vector<int64_t> listed)
      : count_(std::ssize(listed)), listed_(std::make_shared<const std::vector<int64_t>>(std::move(listed))) {}

  int64_t size() const noexcept { return count_; }
  /// Where in the matrix the `index`-th of the file stands.
  int64_t operator()(int64_t index) const noexcept {
    return listed_ == nullptr ? first_ + index * step_ : (*listed_)[static_cast<size_t>(index)];
  }
  /// Whether those of a matrix with `all` of them are all there, as they are.
  bool is_plain(int64_t all) const noexcept { return listed_ == nullptr && first_ == 0 && step_ == 1 && count_ == all; }
  /// The same of whole blocks of `block`; nothing where some are torn apart.
  std::optional<Order> blocks(int64_t block) const;

 private:
  int64_t count_ = 0, first_ = 0, step_ = 1;
  std::shared_ptr<const std::vector<int64_t>> listed_ = {};
};

/// A tensor of a GGUF file, or a part of one, and what of a parameter it holds. The parameter is a matrix of as many
/// columns as its last dimension, a vector one row of it.
struct FilePart {
  std::string name;   ///< "blk.0.ffn_gate_exps.weight"
  int64_t part = -1;  ///< of a tensor that several parameters make up, which one; negative: it is all of it
  Shape shape = {};   ///< of this part
  Order rows = Order(0), columns = Order(0);
  float offset = 0;     ///< added to values
  bool decays = false;  ///< −e^x stands for x

  bool changes_values() const noexcept { return offset != 0 || decays; }
  float to_file(float value) const noexcept;
  /// What to_file() makes `value` of; of several the one that bf16 holds.
  float from_file(float value) const noexcept;
};

/// Rows and columns of a parameter of this shape as a matrix.
struct MatrixSize {
  int64_t rows = 1, columns = 1;
};
MatrixSize matrix_size(const Shape& shape) noexcept;

/// The tensors, one or several, that hold a parameter with a name in GGUF; together all of it, each value once.
std::vector<FilePart> file_parts(const model::ModelConfig& config, const model::Parameter& parameter);

}  // namespace w4q::gguf
