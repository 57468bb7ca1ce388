// The rotation of a linear's inputs (formats/rotation.h) on weights in GPU memory: the bits of the CPU.
#pragma once

#include <cstdint>

#include "device/buffer.h"
#include "formats/rotation.h"
#include "quantize/cuda_work.h"

namespace w4q::quantize {

class RotationCuda {
 public:
  /// Blocks of 2 to kernels::rotate_input_max_block inputs.
  static bool takes(const formats::Rotation& rotation) noexcept;

  RotationCuda(CudaWork& work, const formats::InputRotation& rotation);

  int64_t k() const noexcept { return k_; }
  /// Rows [n, k] ← R · row, and back.
  void rotate(CudaWork& work, float* rows, int64_t n) const;
  void restore(CudaWork& work, float* rows, int64_t n) const;

 private:
  void turn(CudaWork& work, float* rows, int64_t n, const float* factors) const;

  int64_t k_, block_;
  device::DeviceBuffer factors_, ones_;
};

}  // namespace w4q::quantize
