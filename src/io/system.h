// The system calls that the other files of this folder share: descriptors, whole writes, syncs, and their errors.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"

namespace w4q::io {

/// A name or path from outside, fit for a message: printable, and cut when it is absurdly long.
std::string shown(std::string_view text);
std::string shown(const std::string& text);
std::string shown(const std::filesystem::path& path);

/// bad_file: "<path>: <what>: <the system's reason>". Read errno before anything else can change it.
Error system_error(const std::filesystem::path& path, std::string_view what, int error = errno);

/// An open file. Movable; closes when destroyed. Writers sync before they close, so that close has nothing to report.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// open(2), closed on exec. Throws bad_file.
FileDescriptor open_file(const std::filesystem::path& path, int flags, mode_t mode = 0666);

/// Writes all of `bytes` at `offset`. Throws bad_file: disk full, file too large for the user's limit, I/O error.
void write_all(const FileDescriptor& file, std::span<const std::byte> bytes, uint64_t offset,
               const std::filesystem::path& path);

/// Asks the system to begin with writing a range to the disk, so that a later sync waits less. Promises nothing.
void begin_flush(const FileDescriptor& file, uint64_t offset, uint64_t size) noexcept;

/// Flushes a file, or the entries of a folder, to the disk. Throws bad_file.
void sync_file(const FileDescriptor& file, const std::filesystem::path& path);
void sync_folder(const std::filesystem::path& folder);
/// Flushes every file and folder below and including `folder`.
void sync_tree(const std::filesystem::path& folder);

/// Throws bad_file when the disk of `folder` has less than `needed` bytes free.
void check_free_space(const std::filesystem::path& folder, uint64_t needed);

}  // namespace w4q::io
