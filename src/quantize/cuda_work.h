// What the calibrated passes on the GPU share: one stream, and memory that is used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "device/buffer.h"
#include "device/copy.h"
#include "device/cublas.h"
#include "device/send.h"
#include "device/stream.h"

namespace w4q::quantize {

/// Memory that grows to the largest request and stays.
class CudaRoom {
 public:
  explicit CudaRoom(const device::Context& context) : context_(context) {}
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (buffer_.size() < bytes) {
      buffer_ = {};  // before the larger one is taken
      buffer_ = device::DeviceBuffer(context_, bytes);
    }
    return buffer_.as<T>();
  }
  void release() { buffer_ = {}; }

 private:
  const device::Context& context_;
  device::DeviceBuffer buffer_;
};

struct CudaWork {
  device::Context& context;  ///< outlives this
  device::Stream stream{context};
  device::DeviceBuffer cublas{context, device::cublas_workspace_bytes};
  CudaRoom square{context};   ///< k × k: products of activations or of errors
  CudaRoom errors{context};   ///< n × k
  CudaRoom scaled{context};   ///< n × k: weights with scales, in a rotated basis
  CudaRoom columns{context};  ///< a few vectors of k, of n or of blocks
  CudaRoom rows{context};
  CudaRoom sums{context};
  device::Send send{stream};
  std::vector<std::shared_ptr<CudaWork>> beside;  ///< others at the same time, made when they are first needed

  explicit CudaWork(device::Context& context_) : context(context_) {}
  /// On somebody else's stream.
  explicit CudaWork(device::Stream theirs) : context(theirs.context()), stream(std::move(theirs)) {}

  /// Copies of host values, which may go when this returns; ready for what is queued from then on.
  template <class T>
  T* put(CudaRoom& room, const T* values, int64_t count) {
    T* const device = room.get<T>(count);
    send(device, std::as_bytes(std::span(values, static_cast<size_t>(count))));
    return device;
  }
  template <class T>
  std::vector<T> fetch(const T* device, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    device::copy(device::Way::from_gpu, values.data(), device, values.size() * sizeof(T), stream,
                 "copying from the GPU");
    stream.synchronize();
    return values;
  }
  /// Gives back what only the pass that just ended needs.
  void release() {
    for (CudaRoom* room : {&square, &errors, &scaled, &columns, &rows, &sums}) room->release();
  }
};

}  // namespace w4q::quantize
