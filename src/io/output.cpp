#include "io/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "core/text.h"
#include "io/checkpoint.h"
#include "io/digest.h"
#include "io/lost_pages.h"
#include "io/partial.h"
#include "io/system.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

fs::file_type type_of(const fs::path& path) {
  std::error_code missing_or_unreadable;  // whoever creates the output finds out which, with the system's reason
  return fs::status(path, missing_or_unreadable).type();
}

bool is_there(fs::file_type type) { return type != fs::file_type::not_found && type != fs::file_type::none; }
bool is_there(const fs::path& path) { return is_there(type_of(path)); }

/// Neither file nor folder: nothing to replace.
bool is_stream(fs::file_type type) {
  return is_there(type) && type != fs::file_type::regular && type != fs::file_type::directory;
}

fs::path real_path(const fs::path& path) {
  std::error_code error;
  fs::path result = fs::canonical(path, error);
  if (error) throw system_error(path, "cannot resolve", error.value());
  return result;
}

Error bad_target(const fs::path& target, std::string_view problem) {
  return {ErrorCode::bad_argument, concat(shown(target), ": ", problem)};
}

/// The absolute path without links, dots and trailing slash at which `target` stands or will stand.
fs::path resolve(const fs::path& target) {
  if (target.empty()) throw Error(ErrorCode::bad_argument, "the output has an empty name");
  fs::path place = target.has_filename() ? target : target.parent_path();
  if (is_there(place)) return real_path(place);
  std::error_code error;
  if (fs::is_symlink(place, error)) throw bad_target(target, "is a link to something that does not exist");
  if (!place.has_filename() || place.filename() == "." || place.filename() == "..") {
    throw bad_target(target, "is not a name for an output");
  }
  const fs::path parent = place.has_parent_path() ? place.parent_path() : fs::path(".");
  if (type_of(parent) != fs::file_type::directory) {
    throw Error(ErrorCode::bad_file, concat(shown(parent), ": is not an existing folder"))
        .detail("needed to hold the output " + shown(place.filename()))
        .hint("create it first: mkdir -p " + shown(parent));
  }
  return real_path(parent) / place.filename();
}

/// True when `path` is `folder` or lies in it; both are canonical.
bool lies_in(const fs::path& path, const fs::path& folder) {
  const auto rest = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first;
  return rest == folder.end();
}

void refuse_overlap(const fs::path& target, const std::vector<fs::path>& inputs) {
  for (const auto& input : inputs) {
    if (is_stream(type_of(input))) continue;
    std::error_code error;
    fs::path place = fs::weakly_canonical(fs::absolute(input, error), error);
    if (error) throw system_error(input, "cannot resolve", error.value());
    if (!place.has_filename()) place = place.parent_path();
    std::string_view relation;
    if (lies_in(target, place)) relation = target == place ? "is the input" : "lies in the input";
    if (relation.empty() && lies_in(place, target)) relation = "contains the input";
    if (relation.empty()) continue;
    throw bad_target(target, concat("the output ", relation))
        .detail("input: " + shown(input))
        .hint("choose an output outside the input's folder");
  }
}

/// True when a link in `folder` leads to `file`: downloaded models are folders of links.
bool is_linked_in(const fs::path& file, const fs::path& folder) {
  std::error_code error, unreadable;
  fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->is_symlink(unreadable) && fs::equivalent(entry->path(), file, unreadable)) return true;
  }
  return false;
}

/// `named` is what the user wrote, `target` the existing file behind it.
void refuse_input_files(const fs::path& named, const fs::path& target, const std::vector<fs::path>& inputs) {
  const fs::path place = real_path(named.has_parent_path() ? named.parent_path() : ".") / named.filename();
  for (const auto& input : inputs) {
    std::error_code error;
    const fs::path source = fs::canonical(input, error);
    if (error) continue;  // nothing is there, or a pipe
    std::string_view relation;
    if (target == source) {
      relation = "is the input";
    } else if (type_of(source) == fs::file_type::directory) {
      const bool inside = lies_in(target, source) || lies_in(place, source) || is_linked_in(target, source);
      if (inside) relation = "would replace a file of the input";
    }
    if (relation.empty()) continue;
    throw bad_target(named, concat("the output ", relation))
        .detail("input: " + shown(input))
        .hint("choose another name: inputs are never replaced, not even with --overwrite");
  }
}

/// Of a file in a model's folder: a change of it makes another model.
bool tells_meaning(std::string_view name) {
  return is_weight_file(name) || name.ends_with(".json") || name.ends_with(".model");
}

/// Into a terminal, a pipe or a device: such a thing has no size, no place to rename to and nothing to replace.
void write_stream(const fs::path& path, std::span<const std::byte> content) {
  const FileDescriptor file = open_file(path, O_WRONLY);
  while (!content.empty()) {
    const ssize_t count = ::write(file.get(), content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error(path, "cannot write");
    content = content.subspan(static_cast<size_t>(count));
  }
}

}  // namespace

InputStates::InputStates(const std::vector<fs::path>& inputs) {
  const auto add = [this](const fs::path& path) {
    if (const auto state = file_state(path); state && state->regular) states_.emplace_back(path, *state);
  };
  for (const auto& input : inputs) {
    add(input);
    for (const auto& folder : {input, input / sidecar_folder}) {
      std::error_code not_a_folder;
      fs::directory_iterator entry(folder, not_a_folder);
      for (; !not_a_folder && entry != fs::directory_iterator(); entry.increment(not_a_folder)) {
        if (tells_meaning(entry->path().filename().native())) add(entry->path());
      }
    }
  }
}

std::string InputStates::text() const {
  std::string result;
  for (const auto& [path, state] : states_) {
    result += concat(path.filename().native(), " ", state.size, " ", state.modified, "\n");
  }
  return result;
}

std::vector<std::string> InputStates::beginnings() const {
  constexpr uint64_t looked_at = uint64_t{1} << 20;  // config.json, and the headers of weights
  std::vector<std::string> lines;
  for (const auto& [path, state] : states_) {
    std::vector<std::byte> bytes(std::min(state.size, looked_at));
    read_all(open_file(path, O_RDONLY), bytes, 0, path);
    lines.push_back(concat(path.filename().native(), ": ", state.size, " bytes, ", digest_of(bytes).text()));
  }
  std::ranges::sort(lines);  // folders list their files in any order
  return lines;
}

void InputStates::check() const {
  refuse_changed_inputs();
  for (const auto& [path, state] : states_) {
    if (file_state(path) != state) throw changed_error(path, state);
  }
}

void InputStates::let_go() const noexcept {
  for (const auto& [path, state] : states_) stop_watching(state);
}

OutputFolder::OutputFolder(const fs::path& target, bool overwrite, const std::vector<fs::path>& inputs,
                           const std::function<bool(const fs::path&)>& replaceable, const TakeUp& take_up)
    : target_(resolve(target)), replaceable_(replaceable), inputs_(inputs) {
  refuse_overlap(target_, inputs);
  replaces_ = is_there(target_);
  if (replaces_) {
    if (type_of(target_) != fs::file_type::directory) throw bad_target(target, "exists and is not a folder");
    if (!overwrite) throw bad_target(target, "already exists").hint("--overwrite replaces a former output");
    if (target_ == target_.root_path()) throw bad_target(target, "is not a name for an output");
    check_replaceable();
  }
  if (take_up) partial_ = Partial::take_up(target_, [&](const fs::path& left) { return take_up(left, inputs_); });
  taken_up_ = partial_ != nullptr;
  remove_stale_partials(target_);
  if (!taken_up_) partial_ = std::make_unique<Partial>(target_, Partial::Kind::folder);
}

OutputFolder::~OutputFolder() = default;

void OutputFolder::leave_unfinished() noexcept { partial_->leave(); }

void OutputFolder::outlast() noexcept { partial_->outlast(); }

const fs::path& OutputFolder::staging() const noexcept { return partial_->path(); }

void OutputFolder::check_replaceable() const {
  if (replaceable_(target_)) return;
  throw bad_target(target_, "is not a former output of w4q, so it is not replaced")
      .hint("choose another name, or remove the folder yourself");
}

void OutputFolder::commit() {
  sync_tree(partial_->path());  // which may take long
  inputs_.check();
  if (replaces_) {
    if (is_there(target_)) check_replaceable();  // again: the work may have taken hours
    partial_->exchange_with_folder(target_);
  } else {
    partial_->rename_to_new(target_);
  }
  inputs_.let_go();
}

OutputFile::OutputFile(const fs::path& target, bool overwrite, const std::vector<fs::path>& inputs)
    : overwrite_(overwrite), inputs_(inputs) {
  if (type_of(target) == fs::file_type::directory) throw bad_target(target, "is a folder");
  if (!target.has_filename()) throw bad_target(target, "is not a name for a file");
  target_ = resolve(target);
  if (is_there(target_)) {
    if (type_of(target_) != fs::file_type::regular) throw bad_target(target, "exists and is not a file");
    refuse_input_files(target, target_, inputs);
    if (!overwrite) throw bad_target(target, "already exists").hint("--overwrite replaces it");
  }
  remove_stale_partials(target_);
  partial_ = std::make_unique<Partial>(target_, Partial::Kind::file);
}

OutputFile::~OutputFile() = default;

const FileDescriptor& OutputFile::descriptor() const noexcept { return partial_->descriptor(); }

void OutputFile::commit() {
  sync_file(partial_->descriptor(), target_);
  inputs_.check();
  if (overwrite_) {
    partial_->rename_over_file(target_);
  } else {
    partial_->rename_to_new(target_);
  }
  inputs_.let_go();
}

void check_writable(const fs::path& path, bool overwrite, const std::vector<fs::path>& inputs) {
  if (!is_stream(type_of(path))) OutputFile(path, overwrite, inputs);
}

void write_file(const fs::path& path, std::string_view bytes, bool overwrite, const std::vector<fs::path>& inputs) {
  const auto content = std::as_bytes(std::span(bytes));
  // Asked once: what another writer makes meanwhile is a file, not a stream.
  if (is_stream(type_of(path))) return write_stream(path, content);
  OutputFile file(path, overwrite, inputs);
  write_all(file.descriptor(), content, 0, path);
  file.commit();
}

}  // namespace w4q::io
