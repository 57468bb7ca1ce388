// The Gram matrix of a linear's inputs in GPU memory, and the error of outputs through it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "quantize/cuda_work.h"
#include "quantize/rotation_cuda.h"
#include "quantize/statistics.h"

namespace w4q::quantize {

/// Square matrices [k, k] in GPU memory, in place: row and column i divided by scale i; and turned over.
void divide_square(CudaWork& work, float* matrix, int64_t k, std::span<const float> scales);
void transpose_square(CudaWork& work, float* matrix, int64_t k);

class GramCuda {
 public:
  /// supported_gram(): the same bits. `work` must outlive this object.
  GramCuda(CudaWork& work, const InputStatistics& statistics);
  /// The same of sums over `count` rows that stand on the GPU, the upper triangle as in InputStatistics.
  GramCuda(CudaWork& work, const double* triangle, int64_t width, int64_t count);
  /// Of an upper triangle that stands on the CPU.
  GramCuda(CudaWork& work, std::span<const float> triangle, int64_t width);
  /// A matrix that stands on the CPU.
  GramCuda(CudaWork& work, MatrixView<const float> gram);
  /// That of `other`, which outlives it, for work on another stream.
  GramCuda(CudaWork& work, const GramCuda& other) : work_(&work), width_(other.width_), elsewhere_(other.data()) {}

  int64_t width() const noexcept { return width_; }
  const float* data() const noexcept { return elsewhere_ != nullptr ? elsewhere_ : matrix_.as<float>(); }
  /// Everything from now on is done on the stream of `work`; what was asked for before is done.
  void use(CudaWork& work) noexcept { work_ = &work; }
  /// For inputs that are divided by `scales`.
  void divide(std::span<const float> scales);
  /// R · G · Rᵀ, for inputs that are rotated.
  void rotate(const RotationCuda& rotation);
  std::vector<float> diagonal() const;
  std::vector<float> download() const;

  /// tr(E·G·Eᵀ) with E [rows, k] in GPU memory.
  double error(const float* difference, int64_t rows) const;
  /// The same in two steps, for the sum over several E and to compare choices of them: work.square (+)= EᵀE, of which the
  /// upper triangle is needed, with operands rounded to TF32 …
  void add_square(const float* difference, int64_t rows, bool add) const;
  /// … and ⟨work.square, G⟩. Rows are summed in fp64 in a fixed order.
  double square_error() const;

 private:
  void add_square(const float* difference, int64_t rows, bool add, bool rounded) const;
  template <class T>
  void expand(const T* triangle, double scale, double share);

  CudaWork* work_;
  int64_t width_;
  device::DeviceBuffer matrix_;
  const float* elsewhere_ = nullptr;
};

}  // namespace w4q::quantize
