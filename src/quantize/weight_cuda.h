// Weights in GPU memory in fp32, and what scales do to them.
#pragma once

#include <cstdint>
#include <span>

#include "core/views.h"
#include "quantize/cuda_work.h"

namespace w4q::quantize {

/// A matrix of f32, f16 or bf16 widened. Throws bad_file naming row and column of a value that is not finite.
device::DeviceBuffer upload_weight(CudaWork& work, const TensorView& weight);
/// The same of some of its rows.
device::DeviceBuffer upload_rows(CudaWork& work, const TensorView& weight, int64_t first, int64_t rows);

/// The same products and quotients as on the CPU; `scales` are in GPU memory.
void multiply_columns_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales);
void divide_columns_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales);
void divide_rows_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales);

/// The smallest and the largest maximum of blocks of 32 weights that is not zero; zeros when there is none.
struct BlockExtremes {
  float smallest = 0, largest = 0;
};
BlockExtremes block_extremes_cuda(CudaWork& work, const float* weight, int64_t n, int64_t k);

}  // namespace w4q::quantize
