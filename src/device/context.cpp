#include "device/context.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.h"
#include "device/check.h"

namespace w4q::device {
namespace {

/// The GPU that this thread made current last; −1: none yet. Nothing else in this program calls cudaSetDevice.
thread_local int current = -1;

Properties properties_of(int ordinal) {
  std::string why;
  const auto found = find_gpu(&why, ordinal);
  if (!found) throw Error(ErrorCode::device, "no GPU to use: " + why).hint("--device cpu does without");
  return *found;
}

void destroy(LibraryHandle& handle) {
  if (handle.value != nullptr) handle.destroy(handle.value);
}

/// Of a multiprocessor's shared memory, in percent, what one block takes with its reserve.
int carveout_percent(int block_bytes, int64_t all) {
  constexpr int reserved = 1024;
  return static_cast<int>(std::min<int64_t>((100 * int64_t{block_bytes + reserved} + all - 1) / all, 100));
}

}  // namespace

void make_current(int ordinal) {
  if (current == ordinal) return;
  check(cudaSetDevice(ordinal), "choosing a GPU");
  current = ordinal;
}

Scope::Scope(int ordinal) : before_(current) { make_current(ordinal); }

Scope::~Scope() {
  if (before_ < 0 || before_ == current) return;
  cudaSetDevice(before_);
  current = before_;
}

Context::Context(int ordinal, int sharers)
    : ordinal_(ordinal), sharers_(sharers), properties_(properties_of(ordinal)) {}

Context::~Context() {
  if (cublas.value == nullptr && cusolver.value == nullptr) return;
  const Scope here(*this);
  destroy(cublas);
  destroy(cusolver);
}

int64_t Context::free_bytes() const {
  const Scope here(*this);
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return static_cast<int64_t>(free);
}

int64_t Context::budget_bytes() const { return free_bytes() / sharers_; }

bool Context::prepare(const void* kernel, const KernelNeeds& needs) {
  const std::lock_guard lock(mutex_);
  KernelState& state = kernels_[kernel];
  const bool asks = needs.shared_bytes > state.shared_bytes || (needs.keep_apart && !state.kept_apart) ||
                    (needs.overlap && !state.can_overlap);
  if (asks) set_up(kernel, needs, state);
  return needs.overlap && *state.can_overlap;
}

void Context::set_up(const void* kernel, const KernelNeeds& needs, KernelState& state) const {
  const Scope here(*this);
  if (needs.shared_bytes > state.shared_bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, needs.shared_bytes),
          "asking for shared memory");
    state.shared_bytes = needs.shared_bytes;
  }
  if (needs.keep_apart && !state.kept_apart) {
    const int percent = carveout_percent(needs.shared_bytes, properties_.shared_bytes_per_multiprocessor);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent),
          "dividing a multiprocessor's memory");
    state.kept_apart = true;
  }
  if (needs.overlap && !state.can_overlap) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "asking about a kernel");
    state.can_overlap = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
  }
}

}  // namespace w4q::device
