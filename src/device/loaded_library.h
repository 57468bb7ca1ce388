// Libraries of the CUDA toolkit that are opened when they are first needed, so that a program runs without those that
// it does not use.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  /// A handle of the stream's GPU that works on that stream; nobody else has it until this goes.
  class Lease {
   public:
    Lease(Handle handle, LibraryHandle& home) : handle_(handle), home_(&home) {}
    ~Lease() {
      if (home_ == nullptr) return;
      const std::lock_guard lock(home_->mutex);
      static_cast<Idle*>(home_->value)->handles.push_back(handle_);
    }
    Lease(Lease&& other) noexcept : handle_(other.handle_), home_(std::exchange(other.home_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    Handle get() const noexcept { return handle_; }

   private:
    Handle handle_;
    LibraryHandle* home_;
  };
  /// As many handles as threads that call at the same time: submitting takes a while, which others need not wait for.
  Lease borrow(LibraryHandle& home, const Stream& stream) const {
    if (!loaded.why().empty()) {
      throw Error(ErrorCode::device, concat(title, " cannot be loaded: ", loaded.why())).hint(hint);
    }
    const cudaStream_t queue = stream.get();
    Lease lease(idle(home), home);
    check(set_stream(lease.get(), queue), concat("giving ", title, " a stream"));
    return lease;
  }

 private:
  /// What LibraryHandle::value points to: handles that nobody has.
  struct Idle {
    std::vector<Handle> handles;
  };
  Handle idle(LibraryHandle& home) const {
    const std::lock_guard lock(home.mutex);
    if (home.value == nullptr) {
      home.value = new Idle;
      home.destroy = [destroy = destroy](void* value) {
        const std::unique_ptr<Idle> all(static_cast<Idle*>(value));
        for (const Handle handle : all->handles) destroy(handle);
      };
    }
    auto& handles = static_cast<Idle*>(home.value)->handles;
    Handle handle{};
    if (handles.empty()) {
      check(create(&handle), concat("starting ", title));
      handles.reserve(handles.capacity() + 1);  // for its return, which may not fail
    } else {
      handle = handles.back();
      handles.pop_back();
    }
    return handle;
  }
};

}  // namespace w4q::device
