#include "device/cusolver.h"

#include <cusolverDn.h>

#include "core/error.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/loaded_library.h"

namespace w4q::device {
namespace {

/// The functions in use, with the types of the header.
struct Library {
  LoadedLibrary loaded{concat("libcusolver.so.", CUSOLVER_VER_MAJOR), W4Q_CUSOLVER_LIBRARY};
  decltype(&cusolverDnCreate) create = nullptr;
  decltype(&cusolverDnSetStream) set_stream = nullptr;
  decltype(&cusolverDnDpotrf_bufferSize) workspace = nullptr;
  decltype(&cusolverDnDpotrf) factor = nullptr;

  Library() {
    loaded.find("cusolverDnCreate", create);
    loaded.find("cusolverDnSetStream", set_stream);
    loaded.find("cusolverDnDpotrf_bufferSize", workspace);
    loaded.find("cusolverDnDpotrf", factor);
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

void check_cusolver(cusolverStatus_t status, std::string_view doing) {
  if (status != CUSOLVER_STATUS_SUCCESS) {
    throw Error(ErrorCode::device, concat(doing, ": cuSOLVER status ", static_cast<int>(status)));
  }
}

cusolverDnHandle_t handle() {
  return thread_handle<cusolverDnHandle_t>(
      [](cusolverDnHandle_t* made) { check_cusolver(library().create(made), "starting cuSOLVER"); });
}

}  // namespace

bool have_cusolver() { return library().loaded.why().empty(); }

bool cholesky(double* a, int64_t n, cudaStream_t stream) {
  if (!have_cusolver()) throw Error(ErrorCode::device, "cuSOLVER cannot be loaded: " + library().loaded.why());
  const cusolverDnHandle_t solver = handle();
  check_cusolver(library().set_stream(solver, stream), "giving cuSOLVER a stream");
  // The lower triangle of rows is the upper triangle of columns, which is how cuSOLVER sees the matrix.
  constexpr cublasFillMode_t triangle = CUBLAS_FILL_MODE_UPPER;
  const auto order = static_cast<int>(n);
  int values = 0;
  check_cusolver(library().workspace(solver, triangle, order, a, order, &values), "asking cuSOLVER for its workspace");
  DeviceBuffer workspace(static_cast<size_t>(values) * sizeof(double)), info(sizeof(int));
  check_cusolver(library().factor(solver, triangle, order, a, order, workspace.as<double>(), values, info.as<int>()),
                 concat("factoring a matrix of ", n));
  int first_bad = 0;
  check(cudaMemcpyAsync(&first_bad, info.data(), sizeof(first_bad), cudaMemcpyDeviceToHost, stream), "copying");
  check(cudaStreamSynchronize(stream), "factoring");
  if (first_bad < 0) throw Error(ErrorCode::internal, concat("cholesky: argument ", -first_bad));
  return first_bad == 0;
}

}  // namespace w4q::device
