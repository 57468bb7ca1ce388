#include "core/buffer.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace w4q {
namespace {

constexpr size_t mapped_from = size_t{1} << 20;

// Memory of malloc, moved up to a multiple of the alignment; the word before it says where it was. aligned_alloc() of
// glibc before 2.38 does not find what was freed at an alignment again, and the heap grows with every matrix.
static_assert(Buffer::alignment >= sizeof(void*) && alignof(std::max_align_t) >= sizeof(void*));

std::byte* allocate_aligned(size_t size) {
  auto* const whole = static_cast<std::byte*>(::operator new[](size + Buffer::alignment));
  const auto address = reinterpret_cast<uintptr_t>(whole);
  std::byte* const data = whole + (Buffer::alignment - address % Buffer::alignment);
  std::memcpy(data - sizeof(void*), &whole, sizeof(void*));
  return data;
}

void free_aligned(std::byte* data) noexcept {
  std::byte* whole = nullptr;
  std::memcpy(&whole, data - sizeof(void*), sizeof(void*));
  ::operator delete[](whole);
}

/// Mapped memory that waits for its next user.
class Kept {
 public:
  bool open(size_t limit) {
    const std::lock_guard lock(mutex_);
    if (limit_ > 0) return false;
    limit_ = limit;
    return limit > 0;
  }
  void close() {
    const std::lock_guard lock(mutex_);
    for (const auto& [size, data] : blocks_) ::munmap(data, size);
    blocks_.clear();
    limit_ = bytes_ = 0;
  }
  std::byte* take(size_t size) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(size);
    if (found == blocks_.end()) return nullptr;
    std::byte* const data = found->second;
    blocks_.erase(found);
    bytes_ -= size;
    return data;
  }
  /// False: the block stays the caller's.
  bool give(std::byte* data, size_t size) noexcept {
    const std::lock_guard lock(mutex_);
    if (size > limit_) return false;
    while (bytes_ > limit_ - size) {  // then there is a block, the smallest first
      const auto smallest = blocks_.begin();
      if (smallest->first >= size) return false;
      ::munmap(smallest->second, smallest->first);
      bytes_ -= smallest->first;
      blocks_.erase(smallest);
    }
    try {
      blocks_.emplace(size, data);
    } catch (const std::bad_alloc&) {
      return false;
    }
    bytes_ += size;
    return true;
  }

 private:
  std::mutex mutex_;
  size_t limit_ = 0, bytes_ = 0;
  std::multimap<size_t, std::byte*> blocks_;
};

Kept& kept() {
  static Kept blocks;
  return blocks;
}

}  // namespace

BufferReuse::BufferReuse(size_t limit) : active_(kept().open(limit)) {}

BufferReuse::~BufferReuse() {
  if (active_) kept().close();
}

Buffer Buffer::copy_of(std::span<const std::byte> bytes) {
  Buffer result = unfilled(bytes.size());
  if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

Buffer Buffer::view_of(std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  constexpr uintptr_t word = 8;
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % word == 0;
  if (!aligned || owner == nullptr) return copy_of(bytes);
  return {const_cast<std::byte*>(bytes.data()), bytes.size(), std::move(owner)};
}

std::byte* Buffer::allocate(size_t size, bool zeroed) {
  if (size == 0) return nullptr;
  if (size >= mapped_from) {
    if (std::byte* const used = kept().take(size)) {
      if (zeroed) std::memset(used, 0, size);
      return used;
    }
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    // Most of the time of filling fresh memory is page faults; large pages make them rare. A hint: failing is fine.
    ::madvise(data, size, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }
  std::byte* const data = allocate_aligned(size);
  if (zeroed) std::memset(data, 0, size);
  return data;
}

void Buffer::Free::operator()(std::byte* data) const noexcept {
  if (owner != nullptr) return;
  if (size >= mapped_from) {
    if (!kept().give(data, size)) ::munmap(data, size);
  } else {
    free_aligned(data);
  }
}

}  // namespace w4q
