#include "device/installation.h"

#include <cublas_v2.h>
#ifdef W4Q_CUSOLVER_LIBRARY
#include <cusolverDn.h>
#endif

#include "device/loaded_library.h"

namespace w4q::device {

Installation find_installation() {
  Installation found{.toolkit = CUDART_VERSION, .driver = 0, .libraries = {}};
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  const auto look = [&](std::string name, const char* built_with, const char* for_what) {
    const LoadedLibrary library(name, built_with);
    found.libraries.push_back({std::move(name), for_what, library.why()});
  };
  look(concat("libcublas.so.", CUBLAS_VER_MAJOR), W4Q_CUBLAS_LIBRARY, "prompts and calibration on the GPU");
#ifdef W4Q_CUSOLVER_LIBRARY
  look(concat("libcusolver.so.", CUSOLVER_VER_MAJOR), W4Q_CUSOLVER_LIBRARY, "error feedback on the GPU");
#endif
#ifdef W4Q_NCCL_LIBRARY
  look("libnccl.so.2", W4Q_NCCL_LIBRARY, "several GPUs that calibrate together");
#endif
  return found;
}

}  // namespace w4q::device
