#include "decoder_cuda/ring.h"

#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "device/copy.h"

namespace w4q::decoder_cuda {
namespace {

/// What one thread copies at a time; a second one is woken for no less.
constexpr int64_t piece_bytes = 256 << 10;
/// A copy does not begin in what is left of a slot where that is less, unless all of it fits.
constexpr size_t least_piece = 64 << 10;
constexpr size_t alignment = 64;
constexpr size_t most_watched = 1024;

void fill_slot(std::byte* to, std::span<const std::byte> from) {
  parallel_for(std::ssize(from), piece_bytes, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from.data() + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace

UploadRing::~UploadRing() { stream_.drain(); }

void UploadRing::next_slot() {
  fetched_[slot_].record(stream_);
  slot_ = (slot_ + 1) % slots;
  fetched_[slot_].synchronize();
  used_ = 0;
}

void UploadRing::copy(std::byte* to, std::span<const std::byte> from) {
  if (memory_.bytes().empty()) memory_ = device::PinnedBuffer(stream_.context(), slots * slot_bytes);
  while (!from.empty()) {
    const size_t left = slot_bytes - std::min(used_, slot_bytes);
    if (left < std::min(from.size(), least_piece)) {
      next_slot();
      continue;
    }
    const auto piece = from.first(std::min(from.size(), left));
    std::byte* const at = memory_.bytes().data() + slot_ * slot_bytes + used_;
    fill_slot(at, piece);
    device::copy(device::Way::to_gpu, to, at, piece.size(), stream_, "copying weights to the GPU");
    used_ += (piece.size() + alignment - 1) / alignment * alignment;
    to += piece.size();
    from = from.subspan(piece.size());
  }
}

device::DeviceBuffer UploadRing::copy_of(std::span<const std::byte> from) {
  device::DeviceBuffer buffer(stream_.context(), from.size());
  copy(buffer.data(), from);
  return buffer;
}

std::byte* UploadRing::scratch(size_t bytes) {
  if (scratch_.size() < bytes) {
    stream_.synchronize();  // work that is under way may still read the old memory
    scratch_ = device::DeviceBuffer();
    scratch_ = device::DeviceBuffer(stream_.context(), bytes);
  }
  return scratch_.data();
}

unsigned long long* UploadRing::watch(std::function<void(unsigned long long)> look) {
  if (looks_.size() == most_watched) finish();
  if (looks_.empty()) {
    if (watched_.size() == 0) {
      watched_ = device::DeviceBuffer(stream_.context(), most_watched * sizeof(unsigned long long));
    }
    watched_.fill(0xFF, stream_);
  }
  looks_.push_back(std::move(look));
  return watched_.as<unsigned long long>() + looks_.size() - 1;
}

void UploadRing::finish() {
  std::vector<unsigned long long> seen(looks_.size());
  if (!seen.empty()) watched_.download(std::as_writable_bytes(std::span(seen)), stream_);
  stream_.synchronize();
  const auto looks = std::exchange(looks_, {});
  for (size_t i = 0; i < looks.size(); ++i) {
    if (seen[i] != ~0ULL) looks[i](seen[i]);
  }
}

}  // namespace w4q::decoder_cuda
