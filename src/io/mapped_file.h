// A read-only memory map of a whole file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "io/lost_pages.h"

namespace w4q::io {

/// Maps a regular file. Movable; unmaps when destroyed. An empty file gives an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  /// `input`: it is not this program's own, so that a change of it meanwhile spoils what comes of it (lost_pages.h).
  /// Throws bad_file with the reason when the file is missing, unreadable or not a regular file.
  explicit MappedFile(const std::filesystem::path& path, bool input = false);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

  /// Throws bad_file when bytes were asked for that the file no longer had.
  void check() const { range_.check(); }

  /// Tells the kernel that [offset, offset + size) is not needed for now, so that the pages leave this process'
  /// resident memory. The bytes stay readable: they are paged in again on demand.
  void release(size_t offset, size_t size) const noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  MappedRange range_;
};

}  // namespace w4q::io
