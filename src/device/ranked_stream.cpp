#include "device/ranked_stream.h"

#include <algorithm>

#include "device/check.h"

namespace w4q::device {

RankedStream::RankedStream(Context& context, int rank) : context_(context) {
  const Scope here(context);
  int last = 0, first = 0;  // CUDA's highest priority is the lowest number
  check(cudaDeviceGetStreamPriorityRange(&last, &first), "asking for priorities");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, std::min(first + rank, last)),
        "creating a stream");
}

RankedStream::~RankedStream() {
  const Scope here(context_);
  cudaStreamDestroy(stream_);
}

}  // namespace w4q::device
