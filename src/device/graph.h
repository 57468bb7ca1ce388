// Work on a stream, captured once and launched as a whole.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <utility>

#include "device/stream.h"

namespace w4q::device {

class Graph {
 public:
  Graph() = default;
  /// Captures what `work` launches on `stream` (and on no other). Throws device when that fails, and what `work`
  /// throws.
  Graph(const Stream& stream, const std::function<void()>& work);
  ~Graph();
  Graph(Graph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)), nodes_(std::exchange(other.nodes_, 0)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(graph_, other.graph_);
    std::swap(nodes_, other.nodes_);
    return *this;
  }

  explicit operator bool() const noexcept { return graph_ != nullptr; }
  /// Launches, copies and fills of one run.
  size_t nodes() const noexcept { return nodes_; }
  void launch(const Stream& stream) const;

 private:
  cudaGraphExec_t graph_ = nullptr;
  size_t nodes_ = 0;
};

}  // namespace w4q::device
