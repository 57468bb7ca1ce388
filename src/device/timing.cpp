#include "device/timing.h"

#include <algorithm>

#include "device/graph.h"

namespace w4q::device {
int rotating_copies(const Properties& gpu, int64_t bytes) {
  const int64_t wanted = 4 * gpu.l2_bytes;
  return static_cast<int>(std::clamp<int64_t>((wanted + bytes - 1) / std::max<int64_t>(bytes, 1), 1, 1024));
}

Timing time_calls(Context& context, const std::function<void(int, const Stream&)>& call, const TimingOptions& options) {
  const Stream stream(context);
  const Graph graph(stream, [&] {
    for (int i = 0; i < options.calls; ++i) call(i, stream);
  });
  graph.launch(stream);  // warm-up: first launches upload the graph
  stream.synchronize();
  std::vector<double> seconds;
  for (int replay = 0; replay < options.replays; ++replay) {
    Event start, stop;
    start.record(stream);
    graph.launch(stream);
    stop.record(stream);
    stop.synchronize();
    seconds.push_back(stop.seconds_since(start) / options.calls);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), options.calls, options.replays};
}

}  // namespace w4q::device
