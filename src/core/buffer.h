// The one owning byte buffer, which may also be a view that keeps alive what it looks at.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace w4q {

/// Bytes in memory, aligned to 64, zero-initialised. Copies are explicit through clone(). Large buffers are mapped from
/// the system and go back to it at once: tensors of changing sizes must not fragment the heap of a run over a whole
/// model.
class Buffer {
 public:
  static constexpr size_t alignment = 64;

  Buffer() = default;
  explicit Buffer(size_t size) : Buffer(allocate(size, true), size, nullptr) {}
  /// Of whatever was in the memory before: for whoever writes all of it.
  static Buffer unfilled(size_t size) { return {allocate(size, false), size, nullptr}; }
  static Buffer copy_of(std::span<const std::byte> bytes);
  /// Somebody else's bytes, for as long as `owner` keeps them there. They may be read only: the buffer is const, or
  /// nobody asks it for what can be written. A copy where they are not aligned to 8.
  static Buffer view_of(std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  Buffer(Buffer&& other) noexcept = default;
  Buffer& operator=(Buffer&& other) noexcept = default;
  Buffer clone() const { return copy_of(bytes()); }

  std::byte* data() noexcept { return data_.get(); }
  const std::byte* data() const noexcept { return data_.get(); }
  size_t size() const noexcept { return data_ ? data_.get_deleter().size : 0; }
  std::span<std::byte> bytes() noexcept { return {data(), size()}; }
  std::span<const std::byte> bytes() const noexcept { return {data(), size()}; }

  /// The buffer as an array of T; size() is a multiple of sizeof(T) or the rest is left out.
  template <class T>
  std::span<T> as() noexcept {
    return {reinterpret_cast<T*>(data()), size() / sizeof(T)};
  }
  template <class T>
  std::span<const T> as() const noexcept {
    return {reinterpret_cast<const T*>(data()), size() / sizeof(T)};
  }

 private:
  struct Free {
    Free() noexcept : size(0) {}
    Free(size_t size_, std::shared_ptr<const void> owner_) noexcept : size(size_), owner(std::move(owner_)) {}
    void operator()(std::byte* data) const noexcept;
    size_t size;
    std::shared_ptr<const void> owner;  ///< of a view
  };
  Buffer(std::byte* data, size_t size, std::shared_ptr<const void> owner) noexcept
      : data_(data, Free{size, std::move(owner)}) {}
  /// Null for size 0. Throws std::bad_alloc.
  static std::byte* allocate(size_t size, bool zeroed);

  std::unique_ptr<std::byte[], Free> data_;
};

/// While one lives, large buffers that are freed wait for the next of their size instead of going back to the system.
/// Work that goes over many tensors of few shapes spends a quarter of its time in fresh pages otherwise.
class BufferReuse {
 public:
  /// Keeps at most `limit` bytes, large ones rather than small ones. One at a time: inside another's life it does
  /// nothing.
  explicit BufferReuse(size_t limit);
  ~BufferReuse();
  BufferReuse(const BufferReuse&) = delete;
  BufferReuse& operator=(const BufferReuse&) = delete;

 private:
  bool active_ = false;
};

}  // namespace w4q
