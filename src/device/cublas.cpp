#include "device/cublas.h"

#include <cublas_v2.h>

#include "device/loaded_library.h"

namespace w4q::device {
namespace {

/// cublasGemmEx, which the header overloads.
using Multiply = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                                    const void*, cudaDataType_t, int, const void*, cudaDataType_t, int, const void*,
                                    void*, cudaDataType_t, int, cublasComputeType_t, cublasGemmAlgo_t);

/// cublasGemmStridedBatchedEx, likewise.
using MultiplyMany = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                        const void*, const void*, cudaDataType_t, int, long long, const void*,
                                        cudaDataType_t, int, long long, const void*, void*, cudaDataType_t, int,
                                        long long, int, cublasComputeType_t, cublasGemmAlgo_t);

/// The functions in use, with the types of the header.
struct Library : HandleLibrary<cublasHandle_t, cublasStatus_t> {
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  Multiply multiply = nullptr;
  MultiplyMany multiply_many = nullptr;
  decltype(&cublasStrsm_v2) solve = nullptr;

  Library()
      : HandleLibrary{{concat("libcublas.so.", CUBLAS_VER_MAJOR), W4Q_CUBLAS_LIBRARY},
                      "cuBLAS",
                      "install it (Debian: libcublas), or use at most 64 activation rows"} {
    loaded.find("cublasCreate_v2", create);
    loaded.find("cublasDestroy_v2", destroy);
    loaded.find("cublasSetStream_v2", set_stream);
    loaded.find("cublasSetWorkspace_v2", set_workspace);
    loaded.find("cublasGemmEx", multiply);
    loaded.find("cublasGemmStridedBatchedEx", multiply_many);
    loaded.find("cublasStrsm_v2", solve);
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

/// A matrix in cuBLAS' column order.
struct Operand {
  cublasOperation_t operation;
  const void* data;
  cudaDataType_t type;
  int64_t ld;
  int64_t apart = 0;
};

/// c [n × m in column order] = a · b, or c += a · b.
struct Product {
  int64_t n, m, k;
  Operand a, b;
  void* c;
  cudaDataType_t type;
  int64_t ldc;
  bool add;
  bool rounded = false;
  int64_t count = 1;
  int64_t c_apart = 0;
};

void multiply(const Product& p, void* workspace, const Stream& stream) {
  const Library& cublas = library();
  const auto lease = cublas.borrow(stream.context().cublas, stream);
  const cublasHandle_t handle = lease.get();
  cublas.check(cublas.set_workspace(handle, workspace, cublas_workspace_bytes), "giving cuBLAS memory");
  const float one = 1;
  const float kept = p.add ? 1.0f : 0.0f;
  const auto n = static_cast<int>(p.n), m = static_cast<int>(p.m), k = static_cast<int>(p.k);
  const auto lda = static_cast<int>(p.a.ld), ldb = static_cast<int>(p.b.ld), ldc = static_cast<int>(p.ldc);
  const auto arithmetic = p.rounded ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  const cublasStatus_t status =
      p.count == 1 ? cublas.multiply(handle, p.a.operation, p.b.operation, n, m, k, &one, p.a.data, p.a.type, lda,
                                     p.b.data, p.b.type, ldb, &kept, p.c, p.type, ldc, arithmetic, CUBLAS_GEMM_DEFAULT)
                   : cublas.multiply_many(handle, p.a.operation, p.b.operation, n, m, k, &one, p.a.data, p.a.type, lda,
                                          p.a.apart, p.b.data, p.b.type, ldb, p.b.apart, &kept, p.c, p.type, ldc,
                                          p.c_apart, static_cast<int>(p.count), arithmetic, CUBLAS_GEMM_DEFAULT);
  cublas.check(status, concat("multiplying ", p.m, " × ", p.k, " by ", p.n, " × ", p.k));
}

}  // namespace

bool have_cublas() { return library().loaded.why().empty(); }

void cublas_multiply(const CublasProduct& p, const Stream& stream) {
  const cudaDataType_t type = p.dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
  // In cuBLAS' column order the product is yᵀ[n][m] = w[n][k] · xᵀ[k][m].
  multiply({.n = p.n,
            .m = p.m,
            .k = p.k,
            .a = {CUBLAS_OP_T, p.w, type, p.ldw},
            .b = {CUBLAS_OP_N, p.x, type, p.ldx},
            .c = p.y,
            .type = p.fp32_output ? CUDA_R_32F : type,
            .ldc = p.ldy,
            .add = p.add},
           p.workspace, stream);
}

void cublas_multiply(const CublasFloatProduct& p, const Stream& stream) {
  // Likewise cᵀ = op(b)ᵀ · op(a)ᵀ, and rows are columns already.
  multiply({.n = p.n,
            .m = p.m,
            .k = p.k,
            .a = {p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, p.b, CUDA_R_32F, p.ldb, p.b_apart},
            .b = {p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, p.a, CUDA_R_32F, p.lda, p.a_apart},
            .c = p.c,
            .type = CUDA_R_32F,
            .ldc = p.ldc,
            .add = p.add,
            .rounded = p.tensor_cores,
            .count = p.count,
            .c_apart = p.c_apart},
           p.workspace, stream);
}

void cublas_gram(const void* x, const void* y, int64_t rows, int64_t k, float* c, void* workspace,
                 const Stream& stream) {
  multiply({.n = k,
            .m = k,
            .k = rows,
            .a = {CUBLAS_OP_N, y, CUDA_R_16F, k},
            .b = {CUBLAS_OP_T, x, CUDA_R_16F, k},
            .c = c,
            .type = CUDA_R_32F,
            .ldc = k,
            .add = false},
           workspace, stream);
}

void cublas_solve(const float* lower, bool transposed, float* b, int64_t m, int64_t k, void* workspace,
                  const Stream& stream) {
  const Library& cublas = library();
  const auto lease = cublas.borrow(stream.context().cublas, stream);
  const cublasHandle_t handle = lease.get();
  cublas.check(cublas.set_workspace(handle, workspace, cublas_workspace_bytes), "giving cuBLAS memory");
  const float one = 1;
  // In its column order rows are columns, and the lower triangle is an upper one.
  cublas.check(cublas.solve(handle, CUBLAS_SIDE_LEFT, CUBLAS_FILL_MODE_UPPER, transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            CUBLAS_DIAG_UNIT, static_cast<int>(k), static_cast<int>(m), &one, lower,
                            static_cast<int>(k), b, static_cast<int>(k)),
               concat("solving ", m, " rows of ", k));
}

}  // namespace w4q::device
