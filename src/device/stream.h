// Streams and events that clean up after themselves.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace w4q::device {

/// A CUDA stream of its own (not the default stream, and not synchronising with it).
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }

  cudaStream_t get() const noexcept { return stream_; }
  /// Waits for all work so far. Throws device when any of it failed.
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  cudaEvent_t get() const noexcept { return event_; }
  void record(const Stream& stream) const;
  void synchronize() const;
  /// Makes later work of `stream` wait for this event.
  void wait(const Stream& stream) const;
  /// Seconds from `start` to this event; both have happened.
  double seconds_since(const Event& start) const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace w4q::device
