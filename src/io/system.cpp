#include "io/system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/text.h"
#include "io/lost_pages.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

constexpr size_t longest_shown = 200;

}  // namespace

std::string shown(std::string_view text) {
  if (text.size() <= longest_shown) return printable(text);
  return concat(printable(text.substr(0, longest_shown)), "… (", text.size(), " bytes)");
}

std::string shown(const std::string& text) { return shown(std::string_view(text)); }

std::string shown(const fs::path& path) { return printable(path.native()); }

Error system_error(const fs::path& path, std::string_view what, int error) {
  return {ErrorCode::bad_file, concat(shown(path), ": ", what, ": ", std::generic_category().message(error))};
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

namespace {

std::string_view kind_of(mode_t mode) noexcept {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a named pipe, not a file";
  return S_ISSOCK(mode) ? "a socket, not a file" : "a device, not a file";
}

FileState state_of(const struct stat& status) noexcept {
  return {status.st_dev, status.st_ino, static_cast<uint64_t>(status.st_size),
          int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec, S_ISREG(status.st_mode)};
}

}  // namespace

FileState regular_state(const FileDescriptor& file, const fs::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "cannot examine");
  if (S_ISREG(status.st_mode)) return state_of(status);
  throw Error(ErrorCode::bad_file, concat(shown(path), ": is ", kind_of(status.st_mode)));
}

std::optional<FileState> file_state(const fs::path& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? std::optional(state_of(status)) : std::nullopt;
}

bool path_exists(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::none) throw system_error(path, "cannot examine", error.value());
  return type != fs::file_type::not_found;
}

bool is_folder(const fs::path& path) { return path_exists(path) && fs::is_directory(path); }

Error changed_error(const fs::path& path, const FileState& before) {
  const auto now = file_state(path);
  Error error(ErrorCode::bad_file, concat(shown(path), ": was changed while it was read"));
  if (!now) {
    error.detail("it is no longer there");
  } else if (now->size != before.size) {
    error.detail(concat("it had ", before.size, " bytes when it was opened, and has ", now->size, " now"));
  } else if (now->inode != before.inode || now->device != before.device) {
    error.detail("another file stands in its place");
  } else if (now->modified != before.modified) {
    error.detail("it was written to");
  } else {
    error.detail("pages of it could not be read: the disk or the network failed, or it was cut and written again");
  }
  error.hint("run again once nobody writes to it");
  return error;
}

FileDescriptor open_file(const fs::path& path, int flags, mode_t mode) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  if (fd < 0) throw system_error(path, (flags & O_CREAT) ? "cannot create" : "cannot open");
  return FileDescriptor(fd);
}

void write_all(const FileDescriptor& file, std::span<const std::byte> bytes, uint64_t offset, const fs::path& path) {
  constexpr size_t largest_write = size_t{1} << 30;  // the kernel cuts writes at 2 GiB anyway
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.size(), largest_write);
    const ssize_t written = ::pwrite(file.get(), bytes.data(), size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EFAULT) refuse_lost_pages(bytes);
    if (written < 0) throw system_error(path, concat("cannot write ", bytes.size(), " bytes"));
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void read_all(const FileDescriptor& file, std::span<std::byte> bytes, uint64_t offset, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t read = ::pread(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) throw system_error(path, concat("cannot read ", bytes.size(), " bytes"));
    if (read == 0) {
      throw Error(ErrorCode::bad_file, concat(shown(path), ": ends at byte ", offset, ", ", bytes.size(), " too early"))
          .hint("another program may have cut it");
    }
    bytes = bytes.subspan(static_cast<size_t>(read));
    offset += static_cast<uint64_t>(read);
  }
}

void forget_range(const FileDescriptor& file, uint64_t offset, uint64_t size) noexcept {
  ::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(size));
}

void begin_flush(const FileDescriptor& file, uint64_t offset, uint64_t size) noexcept {
  ::sync_file_range(file.get(), static_cast<off_t>(offset), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
}

void sync_file(const FileDescriptor& file, const fs::path& path) {
  if (::fsync(file.get()) == 0) return;
  // EINVAL: nothing to flush here (a file system that keeps no folders on a disk); every other failure is a lost write.
  if (errno != EINVAL) throw system_error(path, "cannot flush to the disk");
}

void sync_folder(const fs::path& folder) { sync_file(open_file(folder, O_RDONLY | O_DIRECTORY), folder); }

void sync_tree(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto type = entry->symlink_status().type();
    if (type == fs::file_type::directory) sync_tree(entry->path());
    if (type == fs::file_type::regular) sync_file(open_file(entry->path(), O_RDONLY), entry->path());
  }
  if (error) throw system_error(folder, "cannot list", error.value());
  sync_folder(folder);
}

void check_free_space(const fs::path& folder, uint64_t needed) {
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) != 0) throw system_error(folder, "cannot ask for the free space");
  const uint64_t free = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  if (needed <= free) return;
  throw Error(ErrorCode::bad_file, concat(shown(folder), ": not enough space on the disk"))
      .detail(concat("needed: ", human_bytes(static_cast<int64_t>(needed)), " (", needed,
                     " bytes), free: ", human_bytes(static_cast<int64_t>(free)), " (", free, " bytes)"))
      .hint("free some space, or write to another disk");
}

}  // namespace w4q::io
