#include "pipeline/exchange_cuda.h"

#include <set>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "device/copy.h"
#include "device/fetch.h"
#include "device/nccl.h"
#include "quantize/cuda_work.h"
#include "ranks/pulse.h"

namespace w4q::pipeline {
namespace {

/// Why GPUs cannot send to one another directly; empty: nothing stands against it. The same at every rank.
std::string obstacle(ranks::Ranks& ranks, const device::Context& gpu) {
  std::string why;
  const bool loads = device::have_nccl(&why);
  const std::string own = loads ? concat(ranks::host_name(), " ", device::gpu_address(gpu)) : "";
  std::set<std::string> gpus;
  for (const auto& each : ranks.gather_everywhere(own)) {
    if (each.empty()) return loads ? "a rank cannot load NCCL" : why;
    if (!gpus.insert(each).second) return "ranks share a GPU";
  }
  return {};
}

}  // namespace

struct ExchangeCuda::Impl {
  Impl(ranks::Ranks& ranks_, quantize::CudaWork& work_) : ranks(ranks_), stream(work_.stream), fetch(stream) {
    const std::string why = obstacle(ranks, work_.context);
    way = why.empty() ? device::nccl_version() : concat("host memory: ", why);
    if (!why.empty()) return;
    const std::string group = ranks.broadcast(ranks.first() ? device::new_nccl_group() : "");
    direct.emplace(work_.context, group, ranks.rank(), ranks.size());
  }

  /// The ranks' messages: what is sent is on its way before anything is waited for.
  void by_host(std::span<const Part> sent, const std::optional<Part>& received) {
    for (const auto& part : sent) {
      std::string bytes(part.bytes, '\0');
      fetch(part.data, std::as_writable_bytes(std::span(bytes)));
      ranks.send(part.rank, std::move(bytes));
    }
    if (!received) return;
    const std::string bytes = ranks.receive(received->rank);
    ensure(bytes.size() == received->bytes, "hidden states of another size came from a rank");
    device::copy(device::Way::to_gpu, received->data, bytes.data(), bytes.size(), stream, "copying hidden states");
    stream.synchronize();
  }

  void directly(std::span<const Part> sent, const std::optional<Part>& received) {
    direct->begin();
    for (const auto& part : sent) direct->send(part.data, part.bytes, part.rank, stream);
    if (received) direct->receive(received->data, received->bytes, received->rank, stream);
    direct->end(stream);
  }

  ranks::Ranks& ranks;
  const device::Stream& stream;
  device::Fetch fetch;
  std::optional<device::NcclGroup> direct;
  std::string way;
};

ExchangeCuda::ExchangeCuda(ranks::Ranks& ranks, quantize::CudaWork& work)
    : impl_(std::make_unique<Impl>(ranks, work)) {}
ExchangeCuda::~ExchangeCuda() = default;

const std::string& ExchangeCuda::way() const noexcept { return impl_->way; }

void ExchangeCuda::exchange(std::span<const Part> sent, const std::optional<Part>& received) {
  if (sent.empty() && !received) return;
  impl_->direct ? impl_->directly(sent, received) : impl_->by_host(sent, received);
}

}  // namespace w4q::pipeline
