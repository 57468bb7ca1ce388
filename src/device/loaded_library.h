// Libraries of the CUDA toolkit that are opened when they are first needed, so that a program runs without those that
// it does not use.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "device/stream.h"

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

/// A function of the driver, found through the runtime: programs are not linked with the driver. Null where it has none
/// of this name.
void* driver_function(const char* name);

/// A library that works through handles, and answers 0 for success: cuBLAS, cuSOLVER.
template <class Handle, class Status>
struct HandleLibrary {
  LoadedLibrary loaded;
  std::string_view title;  ///< in messages, and …
  std::string_view hint;   ///< … what to do where it is missing
  Status (*create)(Handle*) = nullptr;
  Status (*destroy)(Handle) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;

  void check(Status status, std::string_view doing) const {
    if (status == 0) return;
    throw Error(ErrorCode::device, concat(doing, ": ", title, " status ", static_cast<int>(status)));
  }
  /// The handle of the stream's GPU, to work on that stream. Nobody else has it until `lock` goes.
  Handle borrow(LibraryHandle& handle, const Stream& stream, std::unique_lock<std::mutex>& lock) const {
    if (!loaded.why().empty()) {
      throw Error(ErrorCode::device, concat(title, " cannot be loaded: ", loaded.why())).hint(hint);
    }
    lock = std::unique_lock(handle.mutex);
    const cudaStream_t queue = stream.get();
    if (handle.value == nullptr) {
      Handle made{};
      check(create(&made), concat("starting ", title));
      handle.value = made;
      handle.destroy = [destroy = destroy](void* value) { destroy(static_cast<Handle>(value)); };
    }
    const auto found = static_cast<Handle>(handle.value);
    check(set_stream(found, queue), concat("giving ", title, " a stream"));
    return found;
  }
};

}  // namespace w4q::device
