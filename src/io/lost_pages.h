// Files that change while they are mapped. Reading behind the new end of one that was cut, or where a disk fails, is
// SIGBUS: out of whichever thread and function touches the bytes, with nothing to catch and nothing cleaned up.
//
// replace_lost_pages() puts zeros where the file was and notes that; the work goes on with them until somebody asks
// (Checkpoint::load, a commit, the end of the program), which throws, so that no result of it gets anywhere and
// outputs are cleaned up as after any error. A file that is cut within its last page, or written over in place, gives
// no signal: there the state of the file tells.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "core/error.h"
#include "io/system.h"

namespace w4q::io {

/// One mapping, known to replace_lost_pages() for as long as this object lives.
class MappedRange {
 public:
  MappedRange() = default;
  /// `input`: what is mapped is not this program's own, so that nobody may change it meanwhile.
  MappedRange(std::span<const std::byte> bytes, const std::filesystem::path& path, const FileState& state, bool input);
  ~MappedRange();
  MappedRange(MappedRange&& other) noexcept;
  MappedRange& operator=(MappedRange&& other) noexcept;

  /// Throws bad_file when pages were lost.
  void check() const;

 private:
  struct Entry;
  friend bool replace_lost_pages(const void*) noexcept;
  friend void refuse_lost_pages(std::span<const std::byte>);
  friend void refuse_changed_inputs();
  friend std::optional<Error> changed_input();
  friend struct MappedRanges;

  Entry* entry_ = nullptr;
};

/// For a handler of SIGBUS: true when `address` lies in a mapped file; zeros stand there then, and whoever touched it
/// may go on. Async-signal-safe.
bool replace_lost_pages(const void* address) noexcept;
/// Installs a handler that does this. What it does not know goes to the handler that was there before. Programs that
/// have their own call replace_lost_pages() in it instead.
void survive_lost_pages() noexcept;

/// Throws bad_file when `bytes` begin in a mapping: the system could not read them.
void refuse_lost_pages(std::span<const std::byte> bytes);

/// Throws bad_file when an input that is mapped now is no longer what it was.
void refuse_changed_inputs();
/// The same of all inputs that were ever mapped, the first: what a program asks before it tells its results.
std::optional<Error> changed_input();
/// Of inputs that nobody maps any more that is forgotten: for programs that do one work after the other.
void forget_changed_inputs() noexcept;

/// What is mapped of the file that was in this state may change from now on: what comes of it is complete.
void stop_watching(const FileState& state) noexcept;

}  // namespace w4q::io
