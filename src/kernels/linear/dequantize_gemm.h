// Many activation rows: the weight is decoded to 16 bits a strip of outputs at a time and multiplied by cuBLAS.
#pragma once

#include "kernels/linear/packed_linear.h"

namespace w4q::kernels::kbit {

/// Strip and cuBLAS' memory, behind the words that the other kernels keep zero.
size_t wide_workspace(const LinearDesc& desc);
/// Weights enter as 16-bit roundings of their decoded values; a bias is added to the 16-bit result, with a rounding of
/// its own. Needs device::have_cublas().
void run_wide(const LinearArgs& args, cudaStream_t stream);

}  // namespace w4q::kernels::kbit
