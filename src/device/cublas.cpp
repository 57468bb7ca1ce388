#include "device/cublas.h"

#include <cublas_v2.h>

#include <map>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/loaded_library.h"

namespace w4q::device {
namespace {

/// cublasGemmEx, which the header overloads.
using Multiply = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                                    const void*, cudaDataType_t, int, const void*, cudaDataType_t, int, const void*,
                                    void*, cudaDataType_t, int, cublasComputeType_t, cublasGemmAlgo_t);

/// The functions in use, with the types of the header.
struct Library {
  LoadedLibrary loaded{concat("libcublas.so.", CUBLAS_VER_MAJOR), W4Q_CUBLAS_LIBRARY};
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  Multiply multiply = nullptr;

  Library() {
    loaded.find("cublasCreate_v2", create);
    loaded.find("cublasSetStream_v2", set_stream);
    loaded.find("cublasSetWorkspace_v2", set_workspace);
    loaded.find("cublasGemmEx", multiply);
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

void check_cublas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(ErrorCode::device, concat(doing, ": cuBLAS status ", static_cast<int>(status)));
  }
}

cublasHandle_t handle() {
  thread_local std::map<int, cublasHandle_t> handles;
  int gpu = 0;
  check(cudaGetDevice(&gpu), "asking for the GPU");
  auto& handle = handles[gpu];
  if (handle == nullptr) check_cublas(library().create(&handle), "starting cuBLAS");
  return handle;
}

/// A matrix in cuBLAS' column order.
struct Operand {
  cublasOperation_t operation;
  const void* data;
  cudaDataType_t type;
  int64_t ld;
};

/// The handle, ready to multiply on `stream`.
cublasHandle_t prepared(void* workspace, cudaStream_t stream) {
  if (!have_cublas()) {
    throw Error(ErrorCode::device, "cuBLAS cannot be loaded: " + library().loaded.why())
        .hint("install it (Debian: libcublas), or use at most 64 activation rows");
  }
  const cublasHandle_t cublas = handle();
  check_cublas(library().set_stream(cublas, stream), "giving cuBLAS a stream");
  check_cublas(library().set_workspace(cublas, workspace, cublas_workspace_bytes), "giving cuBLAS memory");
  return cublas;
}

/// c [n × m in column order] = a · b, or c += a · b.
void multiply(cublasHandle_t cublas, int64_t n, int64_t m, int64_t k, const Operand& a, const Operand& b, void* c,
              cudaDataType_t type, int64_t ldc, bool add) {
  const float one = 1;
  const float kept = add ? 1.0f : 0.0f;
  const cublasStatus_t status = library().multiply(
      cublas, a.operation, b.operation, static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &one, a.data,
      a.type, static_cast<int>(a.ld), b.data, b.type, static_cast<int>(b.ld), &kept, c, type, static_cast<int>(ldc),
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  check_cublas(status, concat("multiplying ", m, " × ", k, " by ", n, " × ", k));
}

}  // namespace

bool have_cublas() { return library().loaded.why().empty(); }

void cublas_multiply(const CublasProduct& p, cudaStream_t stream) {
  const cudaDataType_t type = p.dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
  // In cuBLAS' column order the product is yᵀ[n][m] = w[n][k] · xᵀ[k][m].
  multiply(prepared(p.workspace, stream), p.n, p.m, p.k, {CUBLAS_OP_T, p.w, type, p.ldw},
           {CUBLAS_OP_N, p.x, type, p.ldx}, p.y, p.fp32_output ? CUDA_R_32F : type, p.ldy, p.add);
}

void cublas_multiply(const CublasFloatProduct& p, cudaStream_t stream) {
  // Likewise cᵀ = op(b)ᵀ · op(a)ᵀ, and rows are columns already.
  multiply(prepared(p.workspace, stream), p.n, p.m, p.k,
           {p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, p.b, CUDA_R_32F, p.ldb},
           {p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, p.a, CUDA_R_32F, p.lda}, p.c, CUDA_R_32F, p.ldc, p.add);
}

void cublas_gram(const void* x, int64_t rows, int64_t k, float* c, void* workspace, cudaStream_t stream) {
  multiply(prepared(workspace, stream), k, k, rows, {CUBLAS_OP_N, x, CUDA_R_16F, k}, {CUBLAS_OP_T, x, CUDA_R_16F, k}, c,
           CUDA_R_32F, k, false);
}

}  // namespace w4q::device
