// A checkpoint that the ranks of a run write together, and that a later run can take up.
//
// The work is cut into units, each of which is done by one rank: the costliest first, to the rank that has the least.
// A unit's tensors go to their places in the files that the first rank has made, so the bytes do not depend on how many
// ranks there are. Units that are finished stand in a journal in the hidden folder, with the digests of their tensors and
// with what the report says of them; whoever takes the folder up checks them and goes on with the others.
//
// Where ranks have disks of their own (Sharing::local_disks) each disk has such a folder, made by the lowest rank that is
// there: files of full length, which hold what the ranks of that disk do. In the end these parts go to the first rank's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "io/output.h"
#include "io/partial.h"
#include "pipeline/output_rules.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

/// The folder of the output: the first rank makes, commits and removes it. On other disks: of a part of it, which the
/// lowest rank there makes and removes.
class SharedFolder {
 public:
  /// As io::OutputFolder, at every rank. Throws bad_file where a rank does not see the folder and disks of its own are not
  /// asked for, mismatch where they are and the copies of an input differ.
  SharedFolder(const Sharing& sharing, const std::filesystem::path& target, bool overwrite,
               const std::vector<std::filesystem::path>& inputs,
               const std::function<bool(const std::filesystem::path&)>& replaceable);
  ~SharedFolder();

  ranks::Ranks& ranks() const noexcept { return *sharing_.ranks; }
  const std::filesystem::path& staging() const noexcept { return staging_; }
  /// For CheckpointWriter: who makes the files.
  io::ShardFiles shard_files() const noexcept {
    if (!leads()) return io::ShardFiles::join;
    if (taken_up_) return io::ShardFiles::mend;
    return ranks().first() ? io::ShardFiles::create : io::ShardFiles::part;
  }
  /// Whether this rank made the folder that it works in.
  bool leads() const noexcept { return disk() == ranks().rank(); }
  /// The disk that this rank works on, by the rank that made the folder there; of every rank.
  int disk() const noexcept { return disks_[static_cast<size_t>(ranks().rank())]; }
  const std::vector<int>& disks() const noexcept { return disks_; }
  /// Whether somebody else's work was taken up: on this disk, and on any.
  bool taken_up() const noexcept { return taken_up_; }
  bool any_taken_up() const noexcept { return any_taken_up_; }
  bool resumes() const noexcept { return sharing_.resume; }
  /// What became of the wish to resume.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  void note(std::string text) { notes_.push_back(std::move(text)); }
  /// From now on there is something to take up.
  void begin_journal();
  void end_journal();
  /// Before the output is in its place, once all ranks have read all that they read: whatever they read from must be what
  /// it was, and may change from then on. Throws where it has changed, Stopped where another rank finds that.
  void agree_on_inputs() const;
  /// Once the output is in its place: parts on other disks go.
  void remove_part();
  /// At the first rank.
  io::OutputFolder& output() { return *made_; }

 private:
  bool is_ours(const std::filesystem::path& left, const io::InputStates& inputs);
  std::string difference(const io::Json& journal, const io::InputStates& inputs) const;

  /// What the constructor does, and what may fail at another rank.
  void join(const std::filesystem::path& target, bool overwrite, const std::vector<std::filesystem::path>& inputs,
            const std::function<bool(const std::filesystem::path&)>& replaceable);
  /// Makes the folder of this rank's disk; returns how the others know it.
  std::string make_folder(const std::filesystem::path& target, bool overwrite,
                          const std::vector<std::filesystem::path>& inputs,
                          const std::function<bool(const std::filesystem::path&)>& replaceable);
  /// One folder of each disk: ranks that see one work there, and the lowest of those that see none makes another.
  void find_disks(const std::filesystem::path& target, const std::vector<std::filesystem::path>& inputs,
                  std::string made);
  [[noreturn]] void refuse_unseen(const std::filesystem::path& target) const;
  void require_same_inputs() const;
  const io::InputStates& inputs() const noexcept { return made_ ? made_->inputs() : inputs_; }

  const Sharing sharing_;
  std::optional<io::OutputFolder> made_;     // at the first rank of a disk; of all but the first rank's a part
  std::vector<int> disks_;                   // of each rank: the first one on its disk
  io::InputStates inputs_;                   // at the others
  std::optional<io::OthersPartial> others_;  // at the others, where nothing is kept
  std::filesystem::path staging_;
  std::vector<std::string> notes_;
  bool taken_up_ = false, any_taken_up_ = false;
};

/// Work of one rank: what it writes, in tensors of the output, and how much it is.
struct WorkUnit {
  std::string name;
  std::vector<std::string> tensors;
  int64_t cost = 0;
  bool in_turn = false;  ///< goes to the ranks in their order, whatever it costs: layers, which all walk through
};

/// The rank of each unit: those in turn first, then the costliest, each to the rank with the least so far; of equal ones
/// the first.
std::vector<int> deal(std::span<const WorkUnit* const> units, int ranks);

class SharedWork {
 public:
  /// Checks what an earlier run finished. `folder` and `writer` outlive this.
  SharedWork(SharedFolder& folder, io::CheckpointWriter& writer, std::vector<WorkUnit> units);

  /// Whether this rank has to do it: not where an earlier run has.
  bool mine(size_t unit) const noexcept { return !records_[unit] && owners_[unit] == folder_.ranks().rank(); }
  /// The rank that has to; −1: an earlier run has.
  int owner(size_t unit) const noexcept { return owners_[unit]; }
  /// Of the units of this rank.
  int64_t cost() const noexcept;
  /// All tensors of a unit are written; `record` is what the report will say.
  void done(size_t unit, const io::Json& record);  // by any thread
  /// Once a rank has done all of its units. At the first rank the record of every unit, and the writer knows all tensors
  /// then; elsewhere nothing.
  std::vector<io::Json> gather();

 private:
  void take_up();
  std::vector<std::string> checked(const std::vector<std::string>& lines) const;
  /// What a line of the journal says, whose tensors are on that disk.
  void adopt(const io::Json& line, int disk);
  void append(std::string_view text);
  /// Brings what other disks hold to the first rank's.
  void put_together();
  std::vector<size_t> sent_by(int rank) const;
  int64_t receive(int from, size_t unit);

  SharedFolder& folder_;
  io::CheckpointWriter& writer_;
  const std::vector<WorkUnit> units_;
  std::map<std::string, size_t, std::less<>> numbers_;  // of units, by their names
  std::vector<int> owners_;                             // −1: finished before
  std::vector<std::optional<io::Json>> records_;
  std::vector<int> disks_;                // of what was finished before; −1: of others
  std::map<size_t, io::Json> elsewhere_;  // at the first rank: lines of units that other disks hold
  io::FileDescriptor journal_;
  std::string finished_;  // lines of this run
  std::mutex mutex_;      // guards the two
};

/// finished() of output_rules.h, at the first rank; the others wait.
template <class Report, class Companions>
Report finished(Report report, io::CheckpointWriter& writer, SharedFolder& folder, const Stopwatch& watch,
                std::vector<io::TensorDigests> bases, const Companions& companions) {
  folder.agree_on_inputs();
  if (folder.ranks().first()) {
    report = finished(std::move(report), writer, folder.output(), watch, std::move(bases), [&](const auto& to) {
      folder.end_journal();
      return companions(to);
    });
  }
  folder.ranks().barrier();
  folder.remove_part();
  return report;
}

}  // namespace w4q::pipeline
