#include "device/spares.h"

#include <cuda_runtime.h>

#include <new>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"

namespace w4q::device {

std::byte* Spares::find(size_t size) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(size);
  if (found == blocks_.end()) return nullptr;
  std::byte* const data = found->second;
  bytes_ -= size;
  blocks_.erase(found);
  return data;
}

std::byte* Spares::take(size_t size) {
  if (size == 0) return nullptr;
  if (std::byte* const spare = find(size)) return spare;
  const Scope here(gpu_);
  void* data = nullptr;
  if (cudaMalloc(&data, size) != cudaSuccess) {
    cudaGetLastError();  // which is not the next launch's
    free_all();
    check(cudaMalloc(&data, size), concat("allocating ", human_bytes(static_cast<int64_t>(size)), " on the GPU"));
  }
  return static_cast<std::byte*>(data);
}

void Spares::give(std::byte* data, size_t size) noexcept {
  if (data == nullptr) return;
  try {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(size, data);
    bytes_ += size;
  } catch (const std::bad_alloc&) {
    const Scope here(gpu_);
    cudaFree(data);
  }
}

void Spares::free_all() noexcept {
  const std::lock_guard lock(mutex_);
  if (blocks_.empty()) return;
  const Scope here(gpu_);
  for (const auto& [size, data] : blocks_) cudaFree(data);
  blocks_.clear();
  bytes_ = 0;
}

int64_t Spares::bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(bytes_);
}

}  // namespace w4q::device
