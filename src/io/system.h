// The system calls that the other files of this folder share: descriptors, whole writes, syncs, and their errors.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
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

/// Which file a path or a descriptor stands for and what was last done to it: whoever writes to it, or puts another in
/// its place, changes this.
struct FileState {
  uint64_t device = 0, inode = 0, size = 0;
  int64_t modified = 0;  ///< nanoseconds since 1970
  bool regular = false;

  bool operator==(const FileState&) const = default;
};
/// Of an open file. Throws bad_file, saying what it is, for anything but a regular file.
FileState regular_state(const FileDescriptor& file, const std::filesystem::path& path);
/// Of what a path leads to; nothing where that cannot be examined.
std::optional<FileState> file_state(const std::filesystem::path& path) noexcept;
/// Whether `path` leads to something, and whether that is a folder. Throws bad_file when that cannot be told: links that
/// lead in a circle, a folder that may not be searched.
bool path_exists(const std::filesystem::path& path);
bool is_folder(const std::filesystem::path& path);

/// bad_file: `path` is no longer what it was; says which file, in what way, and what to do.
Error changed_error(const std::filesystem::path& path, const FileState& before);

/// open(2), closed on exec. Throws bad_file.
FileDescriptor open_file(const std::filesystem::path& path, int flags, mode_t mode = 0666);

/// Writes all of `bytes` at `offset`. Throws bad_file: disk full, file too large for the user's limit, I/O error.
void write_all(const FileDescriptor& file, std::span<const std::byte> bytes, uint64_t offset,
               const std::filesystem::path& path);

/// Reads all of `bytes` from `offset`. Throws bad_file: an I/O error, or the file ends before.
void read_all(const FileDescriptor& file, std::span<std::byte> bytes, uint64_t offset,
              const std::filesystem::path& path);
/// Gives back the disk space of a range, which holds zeros from now on, where the file system can. Promises nothing.
void forget_range(const FileDescriptor& file, uint64_t offset, uint64_t size) noexcept;

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
