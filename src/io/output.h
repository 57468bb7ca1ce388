// Outputs that are complete or absent: written beside their place, synced, then renamed into it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/system.h"

namespace w4q::io {

class Partial;

/// What an output is made from, as it was when the output was begun: the files named, and of folders the weights and
/// what tells their meaning (*.json, *.model). What is no regular file, a pipe for instance, is passed over.
class InputStates {
 public:
  InputStates() = default;
  explicit InputStates(const std::vector<std::filesystem::path>& inputs);
  /// Their names, sizes and times, to tell whether another run reads the same.
  std::string text() const;
  /// Of each a line with its name, size and a digest of how it begins: the same on machines that have copies of it.
  std::vector<std::string> beginnings() const;
  /// Throws bad_file naming one that is no longer what it was, be it because of what is mapped (lost_pages.h).
  void check() const;
  /// From now on they may change.
  void let_go() const noexcept;

 private:
  std::vector<std::pair<std::filesystem::path, FileState>> states_;
};

/// A folder that appears at its place in one step. Until commit() the work lies in a hidden, locked sibling
/// (".NAME.w4q-partial-…"), which the destructor removes; a sibling that a killed run left behind is removed by the
/// next run that writes the same output, or taken up by it. Replacing an existing folder exchanges the two atomically.
class OutputFolder {
 public:
  /// Asked of the hidden folder that a killed run left, and of the inputs as they are now: whether to go on there.
  using TakeUp = std::function<bool(const std::filesystem::path& left, const InputStates& inputs)>;

  /// Throws bad_argument when `target` exists and `overwrite` is false (hint: --overwrite), when it is not a folder
  /// that `replaceable` approves of (which looks at what is in it, and may throw an error of its own that says more),
  /// or when it is, contains or lies in one of `inputs` (pipes are passed over); bad_file when the parent is missing
  /// or cannot be written.
  OutputFolder(const std::filesystem::path& target, bool overwrite, const std::vector<std::filesystem::path>& inputs,
               const std::function<bool(const std::filesystem::path&)>& replaceable, const TakeUp& take_up = {});
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  /// Whether somebody else's work was taken up.
  bool taken_up() const noexcept { return taken_up_; }
  const InputStates& inputs() const noexcept { return inputs_; }
  /// What is in staging() stays there when this object goes without commit(), for a run that takes it up.
  void leave_unfinished() noexcept;
  /// It stays there too where this process is killed.
  void outlast() noexcept;
  /// Where to write.
  const std::filesystem::path& staging() const noexcept;
  /// Syncs everything in staging() and renames it to the target. Throws bad_file, and bad_argument when a new target
  /// has appeared meanwhile or the old one has got something in it that `replaceable` does not approve of, and bad_file
  /// when one of the inputs has changed since the constructor; then nothing has changed.
  void commit();

 private:
  void check_replaceable() const;

  std::filesystem::path target_;
  std::function<bool(const std::filesystem::path&)> replaceable_;
  InputStates inputs_;
  bool replaces_ = false, taken_up_ = false;
  std::unique_ptr<Partial> partial_;
};

/// A file that appears at its place in one step: the same for one file, written through descriptor().
class OutputFile {
 public:
  /// Throws bad_argument when `target` exists and `overwrite` is false (hint: --overwrite), is no file, or is one of
  /// `inputs` or a file in one that is a folder, be it there as a link only (a new name in such a folder is fine);
  /// bad_file when the parent is missing or cannot be written.
  OutputFile(const std::filesystem::path& target, bool overwrite,
             const std::vector<std::filesystem::path>& inputs = {});
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const FileDescriptor& descriptor() const noexcept;
  /// Where it will stand, for messages.
  const std::filesystem::path& target() const noexcept { return target_; }
  /// Syncs the file and renames it to the target. Throws bad_file, also when one of the inputs has changed since the
  /// constructor, and bad_argument when a new target has appeared meanwhile; then nothing has changed.
  void commit();

 private:
  std::filesystem::path target_;
  bool overwrite_ = false;
  InputStates inputs_;
  std::unique_ptr<Partial> partial_;
};

/// Writes a file atomically (temporary sibling, sync, rename). Throws as OutputFile does, bad_file on any failure. What
/// is neither file nor folder (a terminal, a pipe, /dev/null) is simply written to.
void write_file(const std::filesystem::path& path, std::string_view bytes, bool overwrite,
                const std::vector<std::filesystem::path>& inputs = {});
/// Throws what write_file would, as far as that can be known before there is something to write; changes nothing.
void check_writable(const std::filesystem::path& path, bool overwrite,
                    const std::vector<std::filesystem::path>& inputs = {});

}  // namespace w4q::io
