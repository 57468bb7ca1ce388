#include "kernels/linear/gemm.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/text.h"

#ifdef W4Q_HAVE_ONEDNN
#include <dnnl.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl_debug.h>
#else
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#endif

namespace w4q::kernels {
namespace {

enum class Transpose { no, yes };

#ifdef W4Q_HAVE_ONEDNN

/// Keeps OpenMP regions that the calling thread opens to one thread: the setting belongs to the thread, not to the
/// program.
class SingleThreaded {
 public:
  SingleThreaded() noexcept : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~SingleThreaded() {
    if (before_ != 1) omp_set_num_threads(before_);
  }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  const int before_;
};

void multiply(MatrixView<const float> a, MatrixView<const float> b, Transpose transpose, MatrixView<float> c,
              Accumulate accumulate) {
  const SingleThreaded guard;
  const dnnl_status_t status =
      dnnl_sgemm('N', transpose == Transpose::yes ? 'T' : 'N', c.rows, c.cols, a.cols, 1.0f, a.data, a.stride, b.data,
                 b.stride, accumulate == Accumulate::yes ? 1.0f : 0.0f, c.data, c.stride);
  ensure(status == dnnl_success, "dnnl_sgemm failed");
}

#else

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Stride = Eigen::OuterStride<>;

void multiply(MatrixView<const float> a, MatrixView<const float> b, Transpose transpose, MatrixView<float> c,
              Accumulate accumulate) {
  const Eigen::Map<const Matrix, 0, Stride> left(a.data, a.rows, a.cols, Stride(a.stride));
  const Eigen::Map<const Matrix, 0, Stride> right(b.data, b.rows, b.cols, Stride(b.stride));
  Eigen::Map<Matrix, 0, Stride> out(c.data, c.rows, c.cols, Stride(c.stride));
  if (accumulate == Accumulate::no) out.setZero();
  if (transpose == Transpose::yes) {
    out.noalias() += left * right.transpose();
  } else {
    out.noalias() += left * right;
  }
}

#endif

void check_and_multiply(MatrixView<const float> a, MatrixView<const float> b, Transpose transpose, MatrixView<float> c,
                        Accumulate accumulate) {
  const int64_t inner = transpose == Transpose::yes ? b.cols : b.rows;
  const int64_t outputs = transpose == Transpose::yes ? b.rows : b.cols;
  ensure(a.rows == c.rows && outputs == c.cols && a.cols == inner, "gemm: shapes do not fit");
  ensure(a.stride >= a.cols && b.stride >= b.cols && c.stride >= c.cols, "gemm: rows overlap");
  if (c.rows == 0 || c.cols == 0) return;
  if (inner == 0) {
    if (accumulate == Accumulate::no) {
      for (int64_t r = 0; r < c.rows; ++r) std::fill_n(c.row(r), c.cols, 0.0f);
    }
    return;
  }
  multiply(a, b, transpose, c, accumulate);
}

}  // namespace

void gemm_nt(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c, Accumulate accumulate) {
  check_and_multiply(a, b, Transpose::yes, c, accumulate);
}

void gemm_nn(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c, Accumulate accumulate) {
  check_and_multiply(a, b, Transpose::no, c, accumulate);
}

std::string_view gemm_library() noexcept {
#ifdef W4Q_HAVE_ONEDNN
  static const std::string name = [] {
    const dnnl_version_t& version = *dnnl_version();
    return concat("oneDNN ", version.major, ".", version.minor, ".", version.patch, ", ",
                  dnnl_cpu_isa2str(dnnl_get_effective_cpu_isa()));
  }();
  return name;
#else
  return "Eigen";
#endif
}

}  // namespace w4q::kernels
