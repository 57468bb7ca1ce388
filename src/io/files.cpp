#include "io/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/text.h"
#include "io/checkpoint.h"
#include "io/partial.h"
#include "io/system.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

/// Reads up to `size` bytes; fewer only at the end of the file.
size_t read_some(const FileDescriptor& file, char* data, size_t size, const fs::path& path) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count = ::read(file.get(), data + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error(path, "cannot read");
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

void copy_contents(const fs::path& from, const fs::path& to) {
  const FileDescriptor source = open_file(from, O_RDONLY);
  const FileDescriptor target = open_file(to, O_WRONLY | O_CREAT | O_EXCL);
  std::string block(size_t{1} << 20, '\0');
  uint64_t offset = 0;
  while (const size_t size = read_some(source, block.data(), block.size(), from)) {
    write_all(target, std::as_bytes(std::span(block.data(), size)), offset, to);
    offset += size;
  }
}

/// The same weights in another format: they no longer match what stands beside them.
bool is_foreign_weight_file(std::string_view name) {
  const bool torch = name.starts_with("pytorch_model") && (name.ends_with(".bin") || name.ends_with(".bin.index.json"));
  const bool original = name.starts_with("consolidated") && name.ends_with(".pth");
  return torch || original || name.ends_with(".gguf") || name == "tf_model.h5" || name == "flax_model.msgpack";
}

class CompanionListing {
 public:
  CompanionListing(const fs::path& from, const std::vector<std::string>& except) : from_(from), except_(except) {}

  void folder(const fs::path& relative) {
    std::error_code error;
    std::vector<fs::directory_entry> entries;
    fs::directory_iterator listing(from_ / relative, error);
    for (; !error && listing != fs::directory_iterator{}; listing.increment(error)) entries.push_back(*listing);
    if (error) throw system_error(from_ / relative, "cannot list", error.value());
    std::sort(entries.begin(), entries.end());
    for (const auto& each : entries) entry(each, relative / each.path().filename());
  }

  std::vector<std::string> names;

 private:
  void entry(const fs::directory_entry& each, const fs::path& relative) {
    const std::string name = relative.filename().native();
    if (std::find(except_.begin(), except_.end(), relative.native()) != except_.end()) return;
    std::error_code dangling;
    const auto type = each.status(dangling).type();
    if (type == fs::file_type::directory) {
      // A link to a folder is left out wherever it points: so no loop can be entered and nothing is copied twice.
      if (each.is_symlink() || name == ".git" || name == ".cache" || is_partial_name(name)) return;
      folder(relative);
    } else if (type == fs::file_type::regular) {
      const bool weights_lie_here = !relative.has_parent_path() || relative.parent_path() == sidecar_folder;
      if ((weights_lie_here && is_weight_file(name)) || is_foreign_weight_file(name) || is_partial_name(name)) return;
      names.push_back(relative.native());
    }
  }

  const fs::path& from_;
  const std::vector<std::string>& except_;
};

}  // namespace

std::string read_file(const fs::path& path, int64_t max_bytes) {
  const FileDescriptor file = open_file(path, O_RDONLY);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "cannot examine");
  const auto limit = static_cast<size_t>(max_bytes);
  const auto refuse_above_limit = [&](size_t size) {
    if (size <= limit) return;
    throw Error(ErrorCode::bad_file, concat(shown(path), ": too large"))
        .detail(concat("at most ", max_bytes, " bytes are read from such a file"));
  };
  // The size is a first guess only: a pipe has none, and a file may grow.
  refuse_above_limit(static_cast<size_t>(status.st_size));
  std::string text(static_cast<size_t>(status.st_size) + 1, '\0');
  size_t size = 0;
  while (true) {
    size += read_some(file, text.data() + size, text.size() - size, path);
    refuse_above_limit(size);
    if (size < text.size()) break;
    text.resize(std::min(limit + 1, text.size() * 2 + 4096));
  }
  text.resize(size);
  return text;
}

std::vector<std::string> list_companions(const fs::path& from, const std::vector<std::string>& except) {
  CompanionListing listing(from, except);
  listing.folder({});
  return std::move(listing.names);
}

std::vector<std::string> copy_companions(const fs::path& from, const fs::path& to,
                                         const std::vector<std::string>& except) {
  auto names = list_companions(from, except);
  for (const auto& name : names) {
    std::error_code error;
    fs::create_directories((to / name).parent_path(), error);
    if (error) throw system_error((to / name).parent_path(), "cannot create", error.value());
    copy_contents(from / name, to / name);
  }
  return names;
}

}  // namespace w4q::io
