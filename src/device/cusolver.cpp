#include "device/cusolver.h"

#include <cusolverDn.h>

#include "device/buffer.h"
#include "device/check.h"
#include "device/loaded_library.h"

namespace w4q::device {
namespace {

/// The functions in use, with the types of the header.
struct Library : HandleLibrary<cusolverDnHandle_t, cusolverStatus_t> {
  decltype(&cusolverDnDpotrf_bufferSize) workspace = nullptr;
  decltype(&cusolverDnDpotrf) factor = nullptr;

  Library()
      : HandleLibrary{{concat("libcusolver.so.", CUSOLVER_VER_MAJOR), W4Q_CUSOLVER_LIBRARY},
                      "cuSOLVER",
                      "install it (Debian: libcusolver)"} {
    loaded.find("cusolverDnCreate", create);
    loaded.find("cusolverDnDestroy", destroy);
    loaded.find("cusolverDnSetStream", set_stream);
    loaded.find("cusolverDnDpotrf_bufferSize", workspace);
    loaded.find("cusolverDnDpotrf", factor);
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

}  // namespace

bool have_cusolver() { return library().loaded.why().empty(); }

bool cholesky(double* a, int64_t n, const Stream& stream) {
  const Library& solver = library();
  const auto lease = solver.borrow(stream.context().cusolver, stream);
  const cusolverDnHandle_t handle = lease.get();
  // The lower triangle of rows is the upper triangle of columns, which is how cuSOLVER sees the matrix.
  constexpr cublasFillMode_t triangle = CUBLAS_FILL_MODE_UPPER;
  const auto order = static_cast<int>(n);
  int values = 0;
  solver.check(solver.workspace(handle, triangle, order, a, order, &values), "asking cuSOLVER for its workspace");
  DeviceBuffer workspace(stream, static_cast<size_t>(values) * sizeof(double)), info(stream, sizeof(int));
  solver.check(solver.factor(handle, triangle, order, a, order, workspace.as<double>(), values, info.as<int>()),
               concat("factoring a matrix of ", n));
  int first_bad = 0;
  info.download(std::as_writable_bytes(std::span(&first_bad, 1)), stream);
  check(cudaStreamSynchronize(stream.get()), "factoring");
  if (first_bad < 0) throw Error(ErrorCode::internal, concat("cholesky: argument ", -first_bad));
  return first_bad == 0;
}

}  // namespace w4q::device
