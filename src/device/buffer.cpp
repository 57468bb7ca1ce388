#include "device/buffer.h"

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/copy.h"

namespace w4q::device {

DeviceBuffer::DeviceBuffer(const Context& context, size_t size) : gpu_(context.ordinal()), size_(size) {
  if (size == 0) return;
  const Scope here(context);
  void* data = nullptr;
  check(cudaMalloc(&data, size), concat("allocating ", human_bytes(static_cast<int64_t>(size)), " on the GPU"));
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::DeviceBuffer(const Stream& stream, size_t size) {
  if (stream.spares() == nullptr) {
    *this = DeviceBuffer(stream.context(), size);
    return;
  }
  gpu_ = stream.context().ordinal();
  data_ = stream.spares()->take(size);
  size_ = size;
  spares_ = stream.spares();
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  if (spares_ != nullptr) {
    spares_->give(data_, size_);
    return;
  }
  const Scope here(gpu_);
  cudaFree(data_);
}

DeviceBuffer DeviceBuffer::copy_of(std::span<const std::byte> bytes, const Stream& stream) {
  DeviceBuffer result(stream, bytes.size());
  result.upload(bytes, stream);
  return result;
}

void DeviceBuffer::upload(std::span<const std::byte> bytes, const Stream& stream) {
  ensure(bytes.size() <= size_, "upload larger than its buffer");
  if (bytes.empty()) return;
  copy(Way::to_gpu, data_, bytes.data(), bytes.size(), stream, "copying to the GPU");
}

void DeviceBuffer::download(std::span<std::byte> bytes, const Stream& stream) const {
  ensure(bytes.size() <= size_, "download larger than its buffer");
  if (bytes.empty()) return;
  copy(Way::from_gpu, bytes.data(), data_, bytes.size(), stream, "copying from the GPU");
}

void DeviceBuffer::fill(int value, const Stream& stream) {
  if (size_ != 0) device::fill(data_, value, size_, stream, "filling GPU memory");
}

PinnedBuffer::PinnedBuffer(const Context& context, size_t size) : gpu_(context.ordinal()), size_(size) {
  if (size == 0) return;
  const Scope here(context);
  void* data = nullptr;
  check(cudaHostAlloc(&data, size, cudaHostAllocDefault),
        concat("allocating ", human_bytes(static_cast<int64_t>(size)), " of pinned memory"));
  data_ = static_cast<std::byte*>(data);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ == nullptr) return;
  const Scope here(gpu_);
  cudaFreeHost(data_);
}

}  // namespace w4q::device
