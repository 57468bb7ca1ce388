#include "device/graph.h"

#include "device/check.h"

namespace w4q::device {

Graph::Graph(const Stream& stream, const std::function<void()>& work) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream.get(), &graph), "ending a capture");
  cudaGraphGetNodes(graph, nullptr, &nodes_);
  const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "instantiating a graph");
}

Graph::~Graph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

void Graph::launch(const Stream& stream) const { check(cudaGraphLaunch(graph_, stream.get()), "launching a graph"); }

}  // namespace w4q::device
