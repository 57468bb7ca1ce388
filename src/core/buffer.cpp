#include "core/buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace w4q {
namespace {

constexpr size_t mapped_from = size_t{1} << 20;

}  // namespace

Buffer Buffer::copy_of(std::span<const std::byte> bytes) {
  Buffer result(bytes.size());
  if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

std::byte* Buffer::allocate(size_t size) {
  if (size == 0) return nullptr;
  if (size >= mapped_from) {
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    // Most of the time of filling fresh memory is page faults; large pages make them rare. A hint: failing is fine.
    ::madvise(data, size, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }
  auto* data = static_cast<std::byte*>(::operator new[](size, std::align_val_t(alignment)));
  std::memset(data, 0, size);
  return data;
}

void Buffer::Free::operator()(std::byte* data) const noexcept {
  if (size >= mapped_from) {
    ::munmap(data, size);
  } else {
    ::operator delete[](data, std::align_val_t(alignment));
  }
}

}  // namespace w4q
