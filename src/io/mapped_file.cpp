#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "io/system.h"

namespace w4q::io {

MappedFile::MappedFile(const std::filesystem::path& path, bool input) {
  // Without O_NONBLOCK a named pipe would wait here for somebody to write into it.
  const FileDescriptor file = open_file(path, O_RDONLY | O_NONBLOCK);
  const FileState state = regular_state(file, path);
  if (state.size == 0) return;
  const auto size = static_cast<size_t>(state.size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) throw system_error(path, "cannot map into memory");
  data_ = static_cast<std::byte*>(data);
  size_ = size;
  range_ = MappedRange(bytes(), path, state, input);
}

MappedFile::~MappedFile() {
  range_ = {};  // before other bytes can get this address
  if (data_) ::munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      range_(std::move(other.range_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(range_, other.range_);
  return *this;
}

void MappedFile::release(size_t offset, size_t size) const noexcept {
  // Pages at the edges may hold a neighbour that is in use: only whole pages inside the range go. The page that the
  // end of the file shares with nobody goes too.
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t end = std::min(offset + size, size_);
  const size_t first = (offset + page - 1) / page * page;
  const size_t last = end == size_ ? end : end / page * page;
  if (first < last) ::madvise(data_ + first, last - first, MADV_DONTNEED);
}

}  // namespace w4q::io
