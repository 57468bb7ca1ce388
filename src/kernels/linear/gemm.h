// Products of fp32 matrices, row-major, on the calling thread alone: oneDNN where it is installed, Eigen otherwise.
// Parallelism is the caller's, over blocks whose sizes depend on shapes only, so that results do not depend on the
// number of threads (class E2 against an fp64 product).
#pragma once

#include <string_view>

#include "core/views.h"

namespace w4q::kernels {

/// What happens to the values that C holds already.
enum class Accumulate { no, yes };

/// C[m × n] = A[m × k] · B[n × k]ᵀ, plus C when accumulating. Throws internal when the shapes do not fit.
void gemm_nt(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
             Accumulate accumulate = Accumulate::no);

/// C[m × n] = A[m × k] · B[k × n], plus C when accumulating.
void gemm_nn(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
             Accumulate accumulate = Accumulate::no);

/// The library behind the products and the instructions that it uses, on which their last bits depend:
/// "oneDNN 3.0.1, AVX512_CORE", "Eigen".
std::string_view gemm_library() noexcept;

}  // namespace w4q::kernels
