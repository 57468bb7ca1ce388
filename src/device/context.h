// A GPU that somebody works with: what it is, its libraries' handles, and what kernels have been set up to there.
// Whoever opens a context owns it and hands it down; streams and memory are made of it. Compiled with and without CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "device/properties.h"

namespace w4q::device {

/// This thread's calls of the CUDA runtime are about GPU `ordinal` from now on. Costs a comparison where they were.
void make_current(int ordinal);

/// A library's handle for one GPU, made at its first use. Handles are not thread-safe: who uses one holds the mutex.
struct LibraryHandle {
  std::mutex mutex;
  void* value = nullptr;
  std::function<void(void*)> destroy;
};

/// What a kernel asks of a GPU before its first launch there.
struct KernelNeeds {
  int shared_bytes = 0;  ///< dynamic shared memory of a block
  /// No more shared memory on a multiprocessor than one block needs, so that two do not fit. Between launches that
  /// overlap, other kernels empty some multiprocessors before others: where two blocks fit, the next launch's would
  /// gather there, and take twice as long as those that stand alone.
  bool keep_apart = false;
  bool overlap = false;  ///< begin while the launch before is still running
};

/// Thread-safe. Must outlive the streams that are made of it.
class Context {
 public:
  /// GPU `ordinal` of this machine, which so many processes of a run work with. Throws device, with the reason, where it
  /// cannot be used.
  explicit Context(int ordinal = 0, int sharers = 1);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int ordinal() const noexcept { return ordinal_; }
  const Properties& properties() const noexcept { return properties_; }
  /// GPU memory that nobody has taken, in bytes.
  int64_t free_bytes() const;
  /// What this process may take of that for whatever it need not have: others that share the GPU leave it as much, in
  /// whatever order they ask.
  int64_t budget_bytes() const;

  /// Sets `kernel` up, where that has not been done. True where launches may overlap: wanted, and the code that runs on
  /// this GPU was compiled with the waits that it takes (sm_90 and newer).
  bool prepare(const void* kernel, const KernelNeeds& needs);

  LibraryHandle cublas, cusolver;

 private:
  struct KernelState {
    int shared_bytes = 0;
    bool kept_apart = false;
    std::optional<bool> can_overlap;
  };

  void set_up(const void* kernel, const KernelNeeds& needs, KernelState& state) const;

  int ordinal_, sharers_;
  Properties properties_;
  std::mutex mutex_;
  std::unordered_map<const void*, KernelState> kernels_;
};

/// A GPU is current in this thread for as long as this lives; then the one before it is again.
class Scope {
 public:
  explicit Scope(int ordinal);
  explicit Scope(const Context& context) : Scope(context.ordinal()) {}
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  int before_;
};

}  // namespace w4q::device
