// Cold-cache timing: the calls of one measurement are captured into a graph and run back to back over rotating buffers,
// so that launch cost is a graph node's and no call finds its weights in the L2 cache.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "device/stream.h"

namespace w4q::device {

/// Seconds of one call.
struct Timing {
  double median = 0;
  double least = 0;
  double most = 0;
  int calls = 0;  ///< in each graph
  int replays = 0;
};

struct TimingOptions {
  int calls = 20;  ///< captured back to back; at least the number of copies of the data
  int replays = 15;
};

/// How many copies of `bytes` must rotate so that together they pass four times the GPU's L2 cache.
int rotating_copies(const Properties& gpu, int64_t bytes);

/// Captures `call(i, stream)` for i = 0 … calls − 1 into a graph, replays it and returns the time of one call. `call`
/// chooses its buffers by i and must only launch work on `stream`. Throws device when any of it fails.
Timing time_calls(Context& context, const std::function<void(int call, const Stream& stream)>& call,
                  const TimingOptions& options = {});

}  // namespace w4q::device
