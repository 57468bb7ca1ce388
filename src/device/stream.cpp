#include "device/stream.h"

#include "device/check.h"

namespace w4q::device {

Stream::Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Stream::synchronize() const { check(cudaStreamSynchronize(stream_), "waiting for the GPU"); }

Event::Event() { check(cudaEventCreate(&event_), "creating an event"); }

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void Event::record(const Stream& stream) const { check(cudaEventRecord(event_, stream.get()), "recording an event"); }

void Event::synchronize() const { check(cudaEventSynchronize(event_), "waiting for an event"); }

void Event::wait(const Stream& stream) const {
  check(cudaStreamWaitEvent(stream.get(), event_), "waiting for an event");
}

double Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "reading an event");
  return milliseconds * 1e-3;
}

}  // namespace w4q::device
