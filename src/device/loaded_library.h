// Libraries of the CUDA toolkit that are opened when they are first needed, so that a program runs without those that
// it does not use.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <string>

#include "device/check.h"

namespace w4q::device {

/// A shared library for as long as the program lives.
class LoadedLibrary {
 public:
  /// Opens `name` as the loader finds it, or else the file at `built_with`, where the toolkit was at build time.
  LoadedLibrary(std::string name, const char* built_with);

  /// Sets `function` to what the library has under `name`.
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(symbol(name));
  }
  /// Why the library is not there, or lacks a function that was looked for; empty: all is well.
  const std::string& why() const noexcept { return why_; }

 private:
  void* symbol(const char* name);

  std::string name_;
  std::string why_;
  void* library_ = nullptr;
};

/// This thread's handle for the current GPU, made by `create(&handle)` at its first use. Handles live as long as the
/// program: the driver may be gone when a destructor would run.
template <class Handle, class Create>
Handle thread_handle(const Create& create) {
  thread_local std::map<int, Handle> handles;
  int gpu = 0;
  check(cudaGetDevice(&gpu), "asking for the GPU");
  auto& handle = handles[gpu];
  if (handle == nullptr) create(&handle);
  return handle;
}

}  // namespace w4q::device
