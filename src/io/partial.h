// Hidden, locked siblings in which outputs are prepared: ".NAME.w4q-partial-" and 16 hex digits beside NAME.
//
// The lock (flock on the sibling itself) belongs to the process and dies with it, so a sibling that nobody holds is the
// leftover of a killed run. A rename carries the sibling to its place with nothing extra inside.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "io/system.h"

namespace w4q::io {

/// True for names that such siblings have.
bool is_partial_name(std::string_view file_name) noexcept;

/// A sibling that lies in a folder.
struct FoundPartial {
  std::filesystem::path path;
  uint64_t bytes = 0;   ///< of all files in it
  bool living = false;  ///< a process holds it, or the file system cannot tell
};
/// Those in `folder`, sorted by name. Files and folders only: nobody makes links of such names. Throws bad_file.
std::vector<FoundPartial> find_partials(const std::filesystem::path& folder);
/// Those beside `target` that are left of killed runs for outputs of other names, which no run for `target` removes.
std::vector<FoundPartial> leftovers_beside(const std::filesystem::path& target) noexcept;
/// Removes one unless a process holds it; false where it still stands.
bool remove_partial(const std::filesystem::path& path) noexcept;

/// Removes the siblings of `target` that no living process holds. What cannot be removed is left.
void remove_stale_partials(const std::filesystem::path& target) noexcept;

/// For a process that is about to be killed, in whatever thread: takes all siblings that are new here, so that none of
/// them comes to its place any more (Interrupted is thrown there), and what others' are (OthersPartial). Then there is
/// time to say so before they are removed.
class TakenPartials {
 public:
  TakenPartials() noexcept;
  /// Those of others only where these are gone.
  void remove() noexcept;

 private:
  std::vector<std::filesystem::path> own_, others_;
};

/// A sibling that another process on the same work made, and removes: by this one where the other is gone when this one
/// is left by an exception.
class OthersPartial {
 public:
  explicit OthersPartial(std::filesystem::path path);
  ~OthersPartial();
  OthersPartial(const OthersPartial&) = delete;
  OthersPartial& operator=(const OthersPartial&) = delete;

 private:
  std::filesystem::path path_;
};

/// One sibling, new, empty and locked; the destructor removes it.
class Partial {
 public:
  enum class Kind { file, folder };

  /// Throws bad_file when the folder of `target` cannot be written.
  Partial(const std::filesystem::path& target, Kind kind);
  /// A folder for `target` that a killed run left and that `wanted` approves of; null: there is none.
  static std::unique_ptr<Partial> take_up(const std::filesystem::path& target,
                                          const std::function<bool(const std::filesystem::path&)>& wanted);
  ~Partial();
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Open for writing when it is a file.
  const FileDescriptor& descriptor() const noexcept { return descriptor_; }

  /// It stays when this object goes, for a run that takes it up.
  void leave() noexcept { left_ = true; }
  /// It stays also where this process is killed; those that were taken up do.
  void outlast() noexcept;

  /// Renames it to `target`, which must not exist. Throws bad_argument when it does (now).
  void rename_to_new(const std::filesystem::path& target);
  /// Renames a file over `target` in one step.
  void rename_over_file(const std::filesystem::path& target);
  /// Exchanges the folder and the folder `target` in one step, then removes the old one.
  void exchange_with_folder(const std::filesystem::path& target);

 private:
  Partial() = default;
  bool create_and_lock(Kind kind);
  bool forget() noexcept;
  void claim();

  std::filesystem::path path_;
  FileDescriptor descriptor_;
  bool left_ = false;
  bool noted_ = false;  ///< among those that TakenPartials takes
};

}  // namespace w4q::io
