#include "pipeline/window_chunks.h"

#include "core/error.h"
#include "device/copy.h"

namespace w4q::pipeline {

WindowChunks::WindowChunks(const Shape& shape, int64_t resident, const device::Stream& stream)
    : shape_(shape),
      resident_(resident),
      stream_(stream),
      states_(stream.context(), static_cast<size_t>(resident * shape.values) * sizeof(float)),
      loaded_(stream.context(), resident < shape.windows ? bytes(0) : 0) {
  ensure(resident == shape.windows || resident % shape.chunk == 0, "WindowChunks: a chunk that is in two places");
}

float* WindowChunks::load(int64_t chunk, HiddenStates& others) {
  const int64_t first = chunk * shape_.chunk;
  if (stays(chunk)) return window(first);
  for (int64_t i = 0; i < windows(chunk); ++i) {
    const MatrixView<float> hidden = others.get(first + i - resident_);
    device::copy(device::Way::to_gpu, loaded_.as<float>() + i * shape_.values, hidden.data,
                 static_cast<size_t>(shape_.values) * sizeof(float), stream_, "copying hidden states");
    stream_.synchronize();  // the next one may come to the same place
  }
  return loaded_.as<float>();
}

void WindowChunks::store(int64_t chunk, const float* from, HiddenStates& others) {
  const int64_t first = chunk * shape_.chunk;
  if (stays(chunk)) {
    if (from == window(first)) return;
    device::copy(device::Way::on_gpu, window(first), from, bytes(chunk), stream_, "copying hidden states");
    return;
  }
  for (int64_t i = 0; i < windows(chunk); ++i) {
    const MatrixView<float> hidden = others.place(first + i - resident_);
    device::copy(device::Way::from_gpu, hidden.data, from + i * shape_.values,
                 static_cast<size_t>(shape_.values) * sizeof(float), stream_, "copying hidden states");
    stream_.synchronize();
    others.put(first + i - resident_);
  }
}

}  // namespace w4q::pipeline
