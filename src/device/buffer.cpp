#include "device/buffer.h"

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"

namespace w4q::device {

DeviceBuffer::DeviceBuffer(size_t size) : size_(size) {
  if (size == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, size), concat("allocating ", human_bytes(static_cast<int64_t>(size)), " on the GPU"));
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) cudaFree(data_);
}

DeviceBuffer DeviceBuffer::copy_of(std::span<const std::byte> bytes, const Stream& stream) {
  DeviceBuffer result(bytes.size());
  result.upload(bytes, stream);
  return result;
}

void DeviceBuffer::upload(std::span<const std::byte> bytes, const Stream& stream) {
  ensure(bytes.size() <= size_, "upload larger than its buffer");
  if (bytes.empty()) return;
  check(cudaMemcpyAsync(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream.get()), "copying to the GPU");
}

void DeviceBuffer::download(std::span<std::byte> bytes, const Stream& stream) const {
  ensure(bytes.size() <= size_, "download larger than its buffer");
  if (bytes.empty()) return;
  check(cudaMemcpyAsync(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost, stream.get()),
        "copying from the GPU");
}

void DeviceBuffer::fill(int value, const Stream& stream) {
  if (size_ != 0) check(cudaMemsetAsync(data_, value, size_, stream.get()), "filling GPU memory");
}

PinnedBuffer::PinnedBuffer(size_t size) : size_(size) {
  if (size == 0) return;
  void* data = nullptr;
  check(cudaHostAlloc(&data, size, cudaHostAllocDefault),
        concat("allocating ", human_bytes(static_cast<int64_t>(size)), " of pinned memory"));
  data_ = static_cast<std::byte*>(data);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

}  // namespace w4q::device
