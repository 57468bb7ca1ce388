#include "quantize/rotation_cuda.h"

#include <vector>

#include "kernels/rotated/rotate_input.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {

bool RotationCuda::takes(const formats::Rotation& rotation) noexcept {
  return rotation.block >= 2 && rotation.block <= kernels::rotate_input_max_block;
}

RotationCuda::RotationCuda(CudaWork& work, const formats::InputRotation& rotation)
    : k_(rotation.k()),
      block_(rotation.rotation().block),
      factors_(device::DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), work.stream)) {
  const std::vector<float> ones(static_cast<size_t>(k_), 1.0f);
  ones_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(ones)), work.stream);
  work.stream.synchronize();  // the ones go
}

void RotationCuda::turn(CudaWork& work, float* rows, int64_t n, const float* factors) const {
  kernels::RotateInputArgs args;
  args.m = n;
  args.k = k_;
  args.block = block_;
  args.activation = DType::f32;
  args.x = args.y = rows;
  args.ldx = args.ldy = k_;
  args.factors = factors;
  kernels::rotate_input(args, work.stream);
}

void RotationCuda::rotate(CudaWork& work, float* rows, int64_t n) const { turn(work, rows, n, factors_.as<float>()); }

void RotationCuda::restore(CudaWork& work, float* rows, int64_t n) const {
  turn(work, rows, n, ones_.as<float>());
  multiply_columns_cuda(work, rows, n, k_, factors_.as<float>());
}

}  // namespace w4q::quantize
