#include "device/cusolver.h"

#include <cusolverDn.h>
#include <dlfcn.h>

#include <map>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"

namespace w4q::device {
namespace {

/// The functions in use, with the types of the header.
struct Library {
  decltype(&cusolverDnCreate) create = nullptr;
  decltype(&cusolverDnSetStream) set_stream = nullptr;
  decltype(&cusolverDnDpotrf_bufferSize) workspace = nullptr;
  decltype(&cusolverDnDpotrf) factor = nullptr;
  std::string why;  ///< it is not there

  Library() {
    const std::string name = concat("libcusolver.so.", CUSOLVER_VER_MAJOR);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why = dlerror();
      library = dlopen(W4Q_CUSOLVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);  // where the toolkit was when this was built
    }
    if (library == nullptr) return;
    why.clear();
    const bool complete =
        find(library, "cusolverDnCreate", create) && find(library, "cusolverDnSetStream", set_stream) &&
        find(library, "cusolverDnDpotrf_bufferSize", workspace) && find(library, "cusolverDnDpotrf", factor);
    if (!complete) why = name + " lacks a function";
  }

 private:
  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
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

/// This thread's handle for the current GPU, kept as cuBLAS' is.
cusolverDnHandle_t handle() {
  thread_local std::map<int, cusolverDnHandle_t> handles;
  int gpu = 0;
  check(cudaGetDevice(&gpu), "asking for the GPU");
  auto& handle = handles[gpu];
  if (handle == nullptr) check_cusolver(library().create(&handle), "starting cuSOLVER");
  return handle;
}

}  // namespace

bool have_cusolver() { return library().why.empty(); }

bool cholesky(double* a, int64_t n, cudaStream_t stream) {
  if (!have_cusolver()) throw Error(ErrorCode::device, "cuSOLVER cannot be loaded: " + library().why);
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
