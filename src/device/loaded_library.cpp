#include "device/loaded_library.h"

#include <dlfcn.h>

#include <utility>

#include "device/check.h"

namespace w4q::device {

LoadedLibrary::LoadedLibrary(std::string name, const char* built_with)
    : name_(std::move(name)), library_(dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ != nullptr) return;
  why_ = dlerror();
  library_ = dlopen(built_with, RTLD_NOW | RTLD_LOCAL);
  if (library_ != nullptr) why_.clear();
}

void* LoadedLibrary::symbol(const char* name) {
  if (library_ == nullptr) return nullptr;
  void* const found = dlsym(library_, name);
  if (found == nullptr) why_ = name_ + " lacks a function";
  return found;
}

void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  constexpr unsigned version = 12000;
  const auto status = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
#else
  const auto status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  check(status, concat("asking the driver for ", name));
  return function;
}

}  // namespace w4q::device
