#include "device/stream.h"

#include "core/error.h"
#include "device/check.h"

namespace w4q::device {

Stream::Stream(Context& context) : context_(&context) {
  const Scope here(context);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

Stream::~Stream() {
  if (stream_ == nullptr || !owned_) return;
  const Scope here(*context_);
  cudaStreamDestroy(stream_);
}

void Stream::synchronize() const { check(cudaStreamSynchronize(stream_), "waiting for the GPU"); }

void Stream::drain() const noexcept { cudaStreamSynchronize(stream_); }

void Stream::call(void (*function)(void*), void* argument) const {
  check(cudaLaunchHostFunc(get(), function, argument), "queueing a call");
}

Event::~Event() {
  if (event_ == nullptr) return;
  const Scope here(gpu_);
  cudaEventDestroy(event_);
}

void Event::record(const Stream& stream) {
  if (event_ == nullptr) {
    const Scope here(stream.context());
    check(cudaEventCreate(&event_), "creating an event");
    gpu_ = stream.context().ordinal();
  }
  ensure(gpu_ == stream.context().ordinal(), "an event recorded on two GPUs");
  check(cudaEventRecord(event_, stream.get()), "recording an event");
}

void Event::synchronize() const {
  if (event_ != nullptr) check(cudaEventSynchronize(event_), "waiting for an event");
}

void Event::wait(const Stream& stream) const {
  if (event_ != nullptr) check(cudaStreamWaitEvent(stream.get(), event_), "waiting for an event");
}

double Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "reading an event");
  return milliseconds * 1e-3;
}

}  // namespace w4q::device
