// cuSOLVER's Cholesky factorization, found when it is first needed, as cuBLAS is.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace w4q::device {

/// True when this program knows the library and it can be loaded on this machine.
bool have_cusolver();

/// Factors the symmetric matrix a [n][n], row-major in GPU memory, as L·Lᵀ: L stands in the lower triangle afterwards,
/// the rest is undefined. False when the matrix is not positive definite in fp64. Takes its workspace from GPU memory
/// and waits. Throws device when the library is missing or refuses.
bool cholesky(double* a, int64_t n, const Stream& stream);

}  // namespace w4q::device
