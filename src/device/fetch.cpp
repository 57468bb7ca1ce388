#include "device/fetch.h"

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

void Fetch::operator()(const void* from, std::span<std::byte> to) {
  if (piece_.bytes().empty()) piece_ = PinnedBuffer(stream_.context(), piece_bytes);
  std::byte* const piece = piece_.bytes().data();
  const auto* next = static_cast<const std::byte*>(from);
  while (!to.empty()) {
    const size_t size = std::min(to.size(), piece_bytes);
    copy(Way::from_gpu, piece, next, size, stream_, "copying from the GPU");
    stream_.synchronize();
    parallel_for(static_cast<int64_t>(size), part_bytes, [&](int64_t begin, int64_t end) {
      std::memcpy(to.data() + begin, piece + begin, static_cast<size_t>(end - begin));
    });
    next += size;
    to = to.subspan(size);
  }
}

}  // namespace w4q::device
