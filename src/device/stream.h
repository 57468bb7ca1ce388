// Streams and events that clean up after themselves.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <utility>

#include "device/context.h"
#include "device/spares.h"

namespace w4q::device {

/// A CUDA stream: of its own (not the default stream, and not synchronising with it) unless it is somebody else's. The context must outlive it.
class Stream {
 public:
  explicit Stream(Context& context);
  /// Somebody else's stream of the context's GPU, which stays theirs and must outlive this.
  Stream(Context& context, cudaStream_t theirs) noexcept : context_(&context), stream_(theirs), owned_(false) {}
  ~Stream();
  Stream(Stream&& other) noexcept
      : context_(other.context_),
        stream_(std::exchange(other.stream_, nullptr)),
        owned_(other.owned_),
        spares_(std::move(other.spares_)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(stream_, other.stream_);
    std::swap(owned_, other.owned_);
    std::swap(spares_, other.spares_);
    return *this;
  }

  Context& context() const noexcept { return *context_; }
  /// For a launch, or another call of the runtime: the stream's GPU is current in this thread from now on.
  cudaStream_t get() const {
    make_current(context_->ordinal());
    return stream_;
  }
  /// Waits for all work so far. Throws device when any of it failed.
  void synchronize() const;
  /// The same for destructors, which cannot report what failed.
  void drain() const noexcept;
  /// Queues a call on the host.
  void call(void (*function)(void*), void* argument) const;

  /// From now on memory that is asked for in the order of this stream goes round.
  void keep_spares() {
    if (spares_ == nullptr) spares_ = std::make_shared<Spares>(*context_);
  }
  /// Null: memory is freed.
  const std::shared_ptr<Spares>& spares() const noexcept { return spares_; }

 private:
  Context* context_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = true;
  std::shared_ptr<Spares> spares_;
};

/// A point in the work of a stream. It lives on the GPU of the stream that it is recorded on first, and may be recorded
/// again there; before that there is nothing to wait for.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept : gpu_(other.gpu_), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(event_, other.event_);
    return *this;
  }

  void record(const Stream& stream);
  void synchronize() const;
  /// Makes later work of `stream` wait for this event.
  void wait(const Stream& stream) const;
  /// Seconds from `start` to this event; both have happened.
  double seconds_since(const Event& start) const;

 private:
  int gpu_ = 0;
  cudaEvent_t event_ = nullptr;
};

}  // namespace w4q::device
