#include "io/partial.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "core/text.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view marker = ".w4q-partial-";
constexpr size_t digits = 16;

/// ".NAME.w4q-partial-"; a long NAME is cut so that the whole fits into the 255 bytes of a file name.
std::string name_prefix(const fs::path& target) {
  return concat(".", target.filename().native().substr(0, 200), marker);
}

std::string random_digits() {
  std::random_device source;
  std::string text;
  while (text.size() < digits) text += "0123456789abcdef"[source() % 16];
  return text;
}

/// True when `descriptor` is still what `path` names: nobody removed or replaced it before it was locked.
bool same_file(const FileDescriptor& descriptor, const fs::path& path) {
  struct stat opened {
  }, named{};
  return ::fstat(descriptor.get(), &opened) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// Holds the sibling at `path`; nothing where another process does, or where it is a link or gone.
FileDescriptor seize(const fs::path& path) noexcept {
  FileDescriptor descriptor(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  const bool held = descriptor && ::flock(descriptor.get(), LOCK_EX | LOCK_NB) == 0 && same_file(descriptor, path);
  return held ? std::move(descriptor) : FileDescriptor();
}

uint64_t bytes_below(const fs::path& path) {
  std::error_code unreadable;
  if (fs::is_regular_file(fs::symlink_status(path, unreadable))) return fs::file_size(path, unreadable);
  uint64_t bytes = 0;
  fs::recursive_directory_iterator entry(path, unreadable);
  for (; !unreadable && entry != fs::recursive_directory_iterator(); entry.increment(unreadable)) {
    std::error_code gone;
    const auto size = entry->is_regular_file(gone) ? entry->file_size(gone) : 0;
    bytes += gone ? 0 : size;
  }
  return bytes;
}

Error exists_error(const fs::path& target) {
  return Error(ErrorCode::bad_argument, concat(shown(target), ": already exists"))
      .detail("it appeared while this output was being written")
      .hint("use another name, or --overwrite to replace it");
}

/// renameat2 where a new name must not replace anything; where the file system lacks that, link(2) refuses for files,
/// and rename(2) never replaces a folder that holds something.
int rename_without_replacing(const fs::path& from, const fs::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (fs::is_directory(from)) return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  if (::link(from.c_str(), to.c_str()) != 0) return errno;
  return ::unlink(from.c_str()) == 0 ? 0 : errno;
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

/// Others may still work in a folder, as ranks do until they hear that the run has ended: under its new name they find it no
/// more. Whoever was on the way in when it was renamed is met by emptying it again.
void remove_from_under_others(const fs::path& path) noexcept try {
  const std::string name = path.filename().native();
  const fs::path renamed = folder_of(path) / (name.substr(0, name.size() - digits) + random_digits());
  const fs::path& place = ::rename(path.c_str(), renamed.c_str()) == 0 ? renamed : path;
  constexpr int attempts = 8;
  std::error_code failed;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    fs::remove_all(place, failed);
    if (failed != std::errc::directory_not_empty) return;
  }
} catch (const std::exception&) {
  // It stays for the next run of this output to remove.
}

/// The siblings that this process would leave if it were killed. Never destroyed: signals come until the end.
struct Living {
  std::mutex mutex;
  std::vector<fs::path> own, others;
};

Living& living() {
  static Living& all = *new Living;
  return all;
}

/// Those of one output, held or not.
std::vector<fs::path> partials_of(const fs::path& target) {
  const std::string prefix = name_prefix(target);
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder_of(target), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().native();
    if (name.starts_with(prefix) && name.size() == prefix.size() + digits && is_partial_name(name)) {
      found.push_back(entry->path());
    }
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace

bool is_partial_name(std::string_view file_name) noexcept {
  if (file_name.size() < 1 + marker.size() + digits || file_name.front() != '.') return false;
  const auto random = file_name.substr(file_name.size() - digits);
  const auto before = file_name.substr(0, file_name.size() - digits);
  return before.ends_with(marker) && random.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::vector<FoundPartial> find_partials(const fs::path& folder) {
  std::vector<FoundPartial> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path& path = entry->path();
    std::error_code gone;
    const auto type = entry->symlink_status(gone).type();
    if (!is_partial_name(path.filename().native())) continue;
    if (type != fs::file_type::directory && type != fs::file_type::regular) continue;
    found.push_back({path, bytes_below(path), !seize(path)});
  }
  if (error) throw system_error(folder, "cannot list", error.value());
  std::ranges::sort(found, {}, &FoundPartial::path);
  return found;
}

std::vector<FoundPartial> leftovers_beside(const fs::path& target) noexcept try {
  const fs::path place = target.has_filename() ? target : target.parent_path();
  auto found = find_partials(folder_of(place));
  std::erase_if(found, [&](const FoundPartial& each) {
    return each.living || each.path.filename().native().starts_with(name_prefix(place));
  });
  return found;
} catch (const std::exception&) {
  return {};  // a note that is not given
}

bool remove_partial(const fs::path& path) noexcept {
  const FileDescriptor held = seize(path);
  std::error_code failed;
  if (held) fs::remove_all(path, failed);
  return held && !failed;
}

void remove_stale_partials(const fs::path& target) noexcept try {
  for (const auto& path : partials_of(target)) remove_partial(path);
} catch (const std::exception&) {
  // A leftover that stays is only untidy: the output itself does not depend on it.
}

TakenPartials::TakenPartials() noexcept {
  Living& all = living();
  const std::lock_guard lock(all.mutex);
  own_ = std::exchange(all.own, {});
  others_ = std::exchange(all.others, {});
}

void TakenPartials::remove() noexcept {
  for (const auto& path : own_) remove_from_under_others(path);
  for (const auto& path : others_) remove_partial(path);
}

OthersPartial::OthersPartial(fs::path path) : path_(std::move(path)) {
  const std::lock_guard lock(living().mutex);
  living().others.push_back(path_);
}

OthersPartial::~OthersPartial() {
  {
    const std::lock_guard lock(living().mutex);
    std::erase(living().others, path_);
  }
  if (std::uncaught_exceptions() > 0) remove_partial(path_);
}

Partial::Partial(const fs::path& target, Kind kind) {
  // A run that cleans up may take a sibling away between its creation and its lock: then try the next name.
  do path_ = folder_of(target) / (name_prefix(target) + random_digits());
  while (!create_and_lock(kind));
  const std::lock_guard lock(living().mutex);
  living().own.push_back(path_);
  noted_ = true;
}

std::unique_ptr<Partial> Partial::take_up(const fs::path& target, const std::function<bool(const fs::path&)>& wanted) {
  for (const auto& path : partials_of(target)) {
    FileDescriptor held = seize(path);
    if (!held || !fs::is_directory(path) || !wanted(path)) continue;
    std::unique_ptr<Partial> found(new Partial);
    found->path_ = path;
    found->descriptor_ = std::move(held);
    return found;
  }
  return nullptr;
}

bool Partial::create_and_lock(Kind kind) {
  const char* name = path_.c_str();
  if (kind == Kind::folder && ::mkdir(name, 0777) != 0) {
    if (errno == EEXIST) return false;
    throw system_error(folder_of(path_), "cannot create a folder here");
  }
  descriptor_ = FileDescriptor(kind == Kind::folder ? ::open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                                                    : ::open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor_) {
    if (errno == EEXIST || errno == ENOENT) return false;
    throw system_error(folder_of(path_), "cannot create a file here");
  }
  // A file system without locks (ENOLCK, EBADF …) cannot tell living from dead, so nothing there is ever stale.
  if (::flock(descriptor_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    std::error_code gone;
    fs::remove(path_, gone);  // whoever only looks at it does not
    return false;
  }
  return same_file(descriptor_, path_);
}

Partial::~Partial() {
  if (forget() && !path_.empty() && !left_) remove_from_under_others(path_);
}

/// False where it has been taken.
bool Partial::forget() noexcept {
  if (!std::exchange(noted_, false)) return true;
  const std::lock_guard lock(living().mutex);
  return std::erase(living().own, path_) > 0;
}

void Partial::outlast() noexcept { forget(); }

/// Before it goes to its place.
void Partial::claim() {
  if (forget()) return;
  path_.clear();
  throw Interrupted(noted_interrupt());
}

void Partial::rename_to_new(const fs::path& target) {
  claim();
  const int error = rename_without_replacing(path_, target);
  if (error == EEXIST || error == ENOTEMPTY || error == ENOTDIR) throw exists_error(target);
  if (error != 0) throw system_error(target, "cannot rename the finished output into place", error);
  path_.clear();
  sync_folder(folder_of(target));
}

void Partial::rename_over_file(const fs::path& target) {
  claim();
  if (::rename(path_.c_str(), target.c_str()) != 0) throw system_error(target, "cannot replace the old file");
  path_.clear();
  sync_folder(folder_of(target));
}

void Partial::exchange_with_folder(const fs::path& target) {
  claim();
  if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    const int error = errno;
    if (error == ENOENT) return rename_to_new(target);  // the old one went away meanwhile
    if (error != EINVAL && error != ENOSYS) throw system_error(target, "cannot replace the old folder", error);
    throw Error(ErrorCode::bad_file, concat(shown(target), ": this file system cannot exchange two folders"))
        .detail("the old folder is unchanged, the new one was removed")
        .hint("write to another name, then remove the old folder yourself");
  }
  // From here the new folder is in place. What path_ names now is the old one: it goes here, or with the next run.
  sync_folder(folder_of(target));
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  path_.clear();
}

}  // namespace w4q::io
