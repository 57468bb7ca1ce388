#include "model/cuda_offload.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>

#include "core/error.h"
#include "device/check.h"

namespace w4q::model {
namespace {

/// Copies whose events are kept before they are summed up.
constexpr size_t most_timed = 1024;

void CUDART_CB sleep_for(void* microseconds) {
  const std::unique_ptr<std::chrono::microseconds> delay(static_cast<std::chrono::microseconds*>(microseconds));
  std::this_thread::sleep_for(*delay);
}

}  // namespace

std::vector<bool> choose_resident(std::span<const OffloadCandidate> candidates, int64_t budget) {
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto worth = [&](size_t i) {
    return candidates[i].error / static_cast<double>(std::max<int64_t>(candidates[i].bytes, 1));
  };
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return worth(a) > worth(b); });
  std::vector<bool> resident(candidates.size());
  for (const size_t i : order) {
    if (candidates[i].bytes > budget) continue;
    resident[i] = true;
    budget -= candidates[i].bytes;
  }
  return resident;
}

CudaOffload::CudaOffload(std::span<const OffloadedPass* const> passes, const device::Stream& stream)
    : passes_(passes.begin(), passes.end()), stream_(stream) {
  for (const auto* pass : passes_) slot_bytes_ = std::max(slot_bytes_, pass->bytes.bytes().size());
  for (Slot& slot : slots_) {
    slot.buffer = device::DeviceBuffer(slot_bytes_);
    slot.used.record(stream_);
  }
}

int64_t CudaOffload::round_bytes() const noexcept {
  int64_t bytes = 0;
  for (const auto* pass : passes_) bytes += static_cast<int64_t>(pass->bytes.bytes().size());
  return bytes;
}

CudaOffload::~CudaOffload() {
  // Copies may be on their way into the buffers.
  cudaStreamSynchronize(copies_.get());
}

void CudaOffload::fetch(size_t index) {
  Slot& slot = slots_[turn_];
  turn_ = 1 - turn_;
  slot.holds = index;
  slot.used.wait(copies_);
  if (delay_.count() > 0) {
    auto delay = std::make_unique<std::chrono::microseconds>(delay_);
    device::check(cudaLaunchHostFunc(copies_.get(), sleep_for, delay.get()), "delaying copies");
    delay.release();
  }
  Timed& timed = timed_.emplace_back();
  const auto bytes = passes_[index]->bytes.bytes();
  timed.copy_begin.record(copies_);
  device::check(cudaMemcpyAsync(slot.buffer.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, copies_.get()),
                "copying a pass to the GPU");
  timed.copy_end.record(copies_);
  slot.filled.record(copies_);
  ++traffic_.copies;
  traffic_.bytes += static_cast<int64_t>(bytes.size());
}

const std::byte* CudaOffload::acquire(size_t index) {
  ensure(index < passes_.size(), "CudaOffload: no such pass");
  const auto holds = [&](const Slot& slot) { return slot.holds == index; };
  if (timed_.size() + waits_.size() > most_timed) traffic();
  if (std::ranges::none_of(slots_, holds)) {
    fetch(index);
    if (passes_.size() > 1) fetch((index + 1) % passes_.size());
  }
  const Slot& slot = *std::ranges::find_if(slots_, holds);
  Wait& wait = waits_.emplace_back();
  wait.begin.record(stream_);
  slot.filled.wait(stream_);
  wait.end.record(stream_);
  return slot.buffer.data();
}

void CudaOffload::release(size_t index) {
  const auto at = std::ranges::find(slots_, index, &Slot::holds);
  ensure(at != slots_.end(), "CudaOffload: released before it was acquired");
  at->used.record(stream_);
  if (passes_.size() <= slots_.size()) return;
  turn_ = static_cast<size_t>(at - slots_.begin());
  fetch((index + 2) % passes_.size());
}

OffloadTraffic CudaOffload::traffic() {
  copies_.synchronize();
  stream_.synchronize();
  for (const Timed& timed : timed_) traffic_.copy_seconds += timed.copy_end.seconds_since(timed.copy_begin);
  for (const Wait& wait : waits_) traffic_.wait_seconds += wait.end.seconds_since(wait.begin);
  timed_.clear();
  waits_.clear();
  return traffic_;
}

void CudaOffload::reset_traffic() {
  traffic();
  traffic_ = {};
}

}  // namespace w4q::model
