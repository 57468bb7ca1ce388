// A folder that holds a quantized model, opened for reading: what is packed, and packed linears by name.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "array.h"
#include "checkpoint/folder.h"
#include "kernels/linear/linear.h"

namespace w4q::python {

/// One packed linear y = Σ_p W_p · R_p(x ⊘ s), without its bias. Thread-safe.
class PackedLinear {
 public:
  PackedLinear(std::shared_ptr<const checkpoint::Folder> folder, const checkpoint::PackedLinearInfo& info)
      : folder_(std::move(folder)), info_(info) {}

  const checkpoint::PackedLinearInfo& info() const noexcept { return info_; }
  /// W [n, k] in f32, f16 or bf16, with input scale and rotations undone. Throws bad_file for planes that are damaged.
  Array decode(DType dtype) const;
  /// y[rows × n] = x[rows × k] · Wᵀ, f32 on the CPU, rows one behind the other.
  void multiply(const float* x, int64_t rows, float* y) const;
  /// As it stands in the file where a GPU may take it so, else in the canonical layout.
  kernels::LinearWeight load() const;

 private:
  const kernels::LinearWeight& canonical() const;

  std::shared_ptr<const checkpoint::Folder> folder_;
  const checkpoint::PackedLinearInfo& info_;  ///< of the folder
  mutable std::mutex mutex_;
  mutable std::optional<kernels::LinearWeight> canonical_;  ///< kept from its first use on
};

/// Adds the classes Checkpoint and PackedLinear.
void add_checkpoint(nanobind::module_& module);

}  // namespace w4q::python
