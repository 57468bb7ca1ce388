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
  const FileDescriptor source = open_file(from, O_RDONLY | O_NONBLOCK);
  const FileState before = regular_state(source, from);
  const FileDescriptor target = open_file(to, O_WRONLY | O_CREAT | O_EXCL);
  std::string block(size_t{1} << 20, '\0');
  uint64_t offset = 0;
  while (const size_t size = read_some(source, block.data(), block.size(), from)) {
    write_all(target, std::as_bytes(std::span(block.data(), size)), offset, to);
    offset += size;
  }
  if (offset != before.size || regular_state(source, from) != before) throw changed_error(from, before);
}

/// Weights, the same or others, in another format, and what training leaves: they do not belong to what is written.
bool is_foreign_weight_file(std::string_view name) {
  if (name.ends_with(".bin.index.json")) return true;
  constexpr std::string_view endings[] = {".bin",  ".pt",  ".pth", ".gguf", ".ckpt",   ".h5",          ".msgpack",
                                          ".onnx", ".pkl", ".npz", ".npy",  ".tflite", ".safetensors", ".distcp"};
  return std::ranges::any_of(endings, [&](std::string_view ending) { return name.ends_with(ending); });
}

/// More than any tokenizer has: what is larger is no companion, whatever its name.
constexpr uint64_t largest_companion = 100'000'000;

/// Sub-folders that a tokenizer is read with.
bool belongs_to_tokenizer(const fs::path& relative) { return relative == "additional_chat_templates"; }

class CompanionListing {
 public:
  CompanionListing(const fs::path& from, const std::vector<std::string>& except, bool all)
      : from_(from), except_(except), all_(all) {
    std::error_code error;
    real_ = fs::canonical(from, error);
    if (error) throw system_error(from, "cannot list", error.value());
    // models--OWNER--NAME/snapshots/REVISION, whose files are links to models--OWNER--NAME/blobs.
    if (real_.parent_path().filename() == "snapshots") blobs_ = real_.parent_path().parent_path() / "blobs";
  }

  void folder(const fs::path& relative) {
    std::error_code error;
    std::vector<fs::directory_entry> entries;
    fs::directory_iterator listing(from_ / relative, error);
    for (; !error && listing != fs::directory_iterator{}; listing.increment(error)) entries.push_back(*listing);
    if (error) throw system_error(from_ / relative, "cannot list", error.value());
    std::sort(entries.begin(), entries.end());
    for (const auto& each : entries) entry(each, relative / each.path().filename());
  }

  Companions found;

 private:
  void leave_out(const fs::path& relative, std::string_view why) {
    found.left_out.push_back(concat(shown(relative), ": not copied, ", why));
  }

  static bool lies_in(const fs::path& path, const fs::path& folder) {
    return !folder.empty() &&
           std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
  }

  void entry(const fs::directory_entry& each, const fs::path& relative) {
    const std::string name = relative.filename().native();
    if (name == ".git" || name == ".cache" || is_partial_name(name)) return;
    if (std::find(except_.begin(), except_.end(), relative.native()) != except_.end()) return;
    std::error_code unreadable;
    const auto type = each.status(unreadable).type();
    if (type == fs::file_type::directory) return sub_folder(each, relative);
    if (type == fs::file_type::regular) return file(each, relative);
    leave_out(relative, each.is_symlink() ? "a link that leads nowhere" : "it is no file");
  }

  void sub_folder(const fs::directory_entry& each, const fs::path& relative) {
    if (relative == sidecar_folder) return folder(relative);
    // Wherever it points: so no loop can be entered and nothing is copied twice.
    if (each.is_symlink()) return leave_out(relative, "a link to a folder");
    if (!all_ && !belongs_to_tokenizer(relative)) return leave_out(relative, "a sub-folder; --copy-all takes it along");
    folder(relative);
  }

  void file(const fs::directory_entry& each, const fs::path& relative) {
    const std::string name = relative.filename().native();
    if ((!relative.has_parent_path() || relative.parent_path() == sidecar_folder) && is_weight_file(name)) return;
    std::error_code unreadable;
    if (each.is_symlink()) {
      const fs::path real = fs::canonical(each.path(), unreadable);
      if (unreadable || (!lies_in(real, real_) && !lies_in(real, blobs_))) {
        return leave_out(relative, concat("a link out of the model's folder, to ", shown(real)));
      }
    }
    const uint64_t size = each.file_size(unreadable);
    if (!all_ && is_foreign_weight_file(name)) {
      return leave_out(relative, "weights of another format or a training's; --copy-all takes them along");
    }
    if (!all_ && size > largest_companion) {
      return leave_out(relative,
                       concat("it has ", human_bytes(static_cast<int64_t>(size)), "; --copy-all takes it along"));
    }
    found.bytes += unreadable ? 0 : size;
    found.names.push_back(relative.native());
  }

  const fs::path& from_;
  const std::vector<std::string>& except_;
  const bool all_;
  fs::path real_, blobs_;
};

/// Reads an open file of which the system says that it has `stated_size` bytes.
std::string read_open(const FileDescriptor& file, uint64_t stated_size, const fs::path& path, int64_t max_bytes) {
  const auto limit = static_cast<size_t>(max_bytes);
  const auto refuse_above_limit = [&](size_t size) {
    if (size <= limit) return;
    throw Error(ErrorCode::bad_file, concat(shown(path), ": too large"))
        .detail(concat("at most ", max_bytes, " bytes are read from such a file"));
  };
  // The size is a first guess only: a pipe has none, and a file may grow.
  refuse_above_limit(stated_size);
  std::string text(stated_size + 1, '\0');
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

}  // namespace

std::string read_file(const fs::path& path, int64_t max_bytes) {
  const FileDescriptor file = open_file(path, O_RDONLY);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "cannot examine");
  return read_open(file, static_cast<uint64_t>(status.st_size), path, max_bytes);
}

std::string read_model_file(const fs::path& path, int64_t max_bytes) {
  // Without O_NONBLOCK a named pipe would wait here for somebody to write into it.
  const FileDescriptor file = open_file(path, O_RDONLY | O_NONBLOCK);
  const FileState before = regular_state(file, path);
  std::string text = read_open(file, before.size, path, max_bytes);
  if (regular_state(file, path) != before) throw changed_error(path, before);
  return text;
}

Companions list_companions(const fs::path& from, const std::vector<std::string>& except, bool all) {
  CompanionListing listing(from, except, all);
  listing.folder({});
  return std::move(listing.found);
}

Companions copy_companions(const fs::path& from, const fs::path& to, const std::vector<std::string>& except, bool all) {
  auto companions = list_companions(from, except, all);
  for (const auto& name : companions.names) {
    std::error_code error;
    fs::create_directories((to / name).parent_path(), error);
    if (error) throw system_error((to / name).parent_path(), "cannot create", error.value());
    copy_contents(from / name, to / name);
  }
  return companions;
}

}  // namespace w4q::io
