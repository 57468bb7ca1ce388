#include "decoder_cuda/offload.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>

#include "core/error.h"
#include "device/copy.h"

namespace w4q::decoder_cuda {
namespace {

/// Copies and waits whose events are kept: more than can be under way.
constexpr size_t most_timed = 1024;

/// Bytes of a pass in the ring.
size_t ring_size(const OffloadedPass& pass) { return (pass.bytes.bytes().size() + 255) / 256 * 256; }

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
    : passes_(passes.begin(), passes.end()), stream_(stream), copies_(stream.context()) {
  size_t largest = 0;
  for (const auto* pass : passes_) largest = std::max(largest, ring_size(*pass));
  ring_ = device::DeviceBuffer(stream.context(), 2 * largest);
  used_.record(stream_);
}

int64_t CudaOffload::round_bytes() const noexcept {
  int64_t bytes = 0;
  for (const auto* pass : passes_) bytes += static_cast<int64_t>(pass->bytes.bytes().size());
  return bytes;
}

CudaOffload::~CudaOffload() {
  // Copies may be on their way into the ring.
  copies_.drain();
}

std::optional<size_t> CudaOffload::place(size_t size) const {
  if (held_.empty()) return 0;
  const size_t begin = held_.front().at, end = held_.back().at + held_.back().size;
  if (end <= begin) return begin - end >= size ? std::optional(end) : std::nullopt;
  if (ring_.size() - end >= size) return end;
  return begin >= size ? std::optional<size_t>(0) : std::nullopt;
}

void CudaOffload::fetch(size_t index) {
  used_.wait(copies_);
  while (held_.size() < passes_.size()) {
    if (!held_.empty()) index = (held_.back().index + 1) % passes_.size();
    const auto at = place(ring_size(*passes_[index]));
    if (!at) return;
    fetch_to(*at, index);
  }
}

void CudaOffload::fetch_to(size_t at, size_t index) {
  if (delay_.count() > 0) {
    auto delay = std::make_unique<std::chrono::microseconds>(delay_);
    copies_.call(sleep_for, delay.get());
    delay.release();
  }
  const auto bytes = passes_[index]->bytes.bytes();
  Span& time = copying_.emplace_back();
  time.begin.record(copies_);
  device::copy(device::Way::to_gpu, ring_.data() + at, bytes.data(), bytes.size(), copies_,
               "copying a pass to the GPU");
  time.end.record(copies_);
  held_.push_back({index, at, ring_size(*passes_[index]), {}});
  held_.back().filled.record(copies_);
  ++traffic_.copies;
  traffic_.bytes += static_cast<int64_t>(bytes.size());
}

const std::byte* CudaOffload::acquire(size_t index) {
  ensure(index < passes_.size(), "CudaOffload: no such pass");
  if (skips_) return ring_.data();
  if (copying_.size() > 2 * most_timed) shorten(copying_, traffic_.copy_seconds, most_timed);
  if (waiting_.size() > 2 * most_timed) shorten(waiting_, traffic_.wait_seconds, most_timed);
  while (!held_.empty() && held_.front().index != index) held_.pop_front();
  fetch(index);
  Span& wait = waiting_.emplace_back();
  wait.begin.record(stream_);
  held_.front().filled.wait(stream_);
  wait.end.record(stream_);
  return ring_.data() + held_.front().at;
}

void CudaOffload::release(size_t index) {
  if (skips_) return;
  ensure(!held_.empty() && held_.front().index == index, "CudaOffload: released before it was acquired");
  used_.record(stream_);
  // Where the ring has room for all passes they stay.
  if (held_.size() == passes_.size()) held_.push_back(std::move(held_.front()));
  held_.pop_front();
  fetch((index + 1) % passes_.size());
}

void CudaOffload::shorten(std::deque<Span>& spans, double& seconds, size_t keep) {
  if (spans.size() <= keep) return;
  spans[spans.size() - keep - 1].end.synchronize();
  while (spans.size() > keep) {
    seconds += spans.front().end.seconds_since(spans.front().begin);
    spans.pop_front();
  }
}

void CudaOffload::skip_copies(bool skip) {
  copies_.synchronize();
  held_.clear();
  ring_.fill(0, stream_);
  stream_.synchronize();
  skips_ = skip;
}

OffloadTraffic CudaOffload::traffic() {
  copies_.synchronize();
  stream_.synchronize();
  shorten(copying_, traffic_.copy_seconds, 0);
  shorten(waiting_, traffic_.wait_seconds, 0);
  return traffic_;
}

void CudaOffload::reset_traffic() {
  traffic();
  traffic_ = {};
}

}  // namespace w4q::decoder_cuda
