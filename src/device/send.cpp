#include "device/send.h"

#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "device/copy.h"

namespace w4q::device {
namespace {

constexpr size_t piece_bytes = size_t{16} << 20;
/// What one thread copies at a time.
constexpr int64_t part_bytes = 256 << 10;

}  // namespace

Send::~Send() { stream_.drain(); }

void Send::operator()(void* to, std::span<const std::byte> from) {
  if (memory_.bytes().empty()) memory_ = PinnedBuffer(stream_.context(), pieces * piece_bytes);
  auto* next = static_cast<std::byte*>(to);
  while (!from.empty()) {
    const auto piece = from.first(std::min(from.size(), piece_bytes));
    std::byte* const at = memory_.bytes().data() + next_ * piece_bytes;
    fetched_[next_].synchronize();
    parallel_for(std::ssize(piece), part_bytes, [&](int64_t begin, int64_t end) {
      std::memcpy(at + begin, piece.data() + begin, static_cast<size_t>(end - begin));
    });
    copy(Way::to_gpu, next, at, piece.size(), stream_, "copying to the GPU");
    fetched_[next_].record(stream_);
    next_ = (next_ + 1) % pieces;
    next += piece.size();
    from = from.subspan(piece.size());
  }
}

}  // namespace w4q::device
